"""A model's name -> its module, tokenizer and proven layout.

Nothing is guessed in silence: weights that are missing, a tokenizer without words, pickled weights, code from a hub
and a layout that fails its check all stop here, with one sentence that says what to do.
"""

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from anisoscope.errors import AnisoscopeError, MissingPackageError, ModelError, SpecError
from anisoscope.layout import Layout as Layout
from anisoscope.layout import Stack as Stack
from anisoscope.layout import discover_layout as discover_layout
from anisoscope.layout import is_causal
from anisoscope.layout import select_sites as select_sites
from anisoscope.layout import sites_of as sites_of
from anisoscope.layout import verify_layout as verify_layout
from anisoscope.sources import Source, hash_weights, is_commit, is_seed, list_files, locate, weight_files
from anisoscope.trace import is_encoder_decoder, make_probe, run_module, trace_module
from anisoscope.validation import check_setting


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A module and tokenizer, and what was proven about them."""

    name: str
    module: nn.Module
    """Run it through `capture`, which sees to evaluation mode."""
    tokenizer: Any
    layout: Layout
    kind: str
    """`encoder`, `decoder` or `encoder-decoder`."""
    head: str | None
    """Which language-model loss its logits support: `causal`, `masked` or None."""
    weights: str | None
    """Commit hash of a hub model, else SHA-256 of the weights; None in training, where run and step name them."""
    notes: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    """One sentence per fact that was proven when it was loaded."""
    logits_width: int = 0
    """Logits per position; 0 without a head."""
    plain_head: str | None = None
    """Path of the linear module whose output was proven to be the logits, with nothing done to them afterwards."""


def load_model(
    name: str,
    *,
    revision: str | None = None,
    weights: str | None = None,
    folder: Path | None = None,
    dtype: str = "float32",
    device: str = "auto",
    device_map: Any = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    blocks: tuple[str, ...] = (),
    final_norm: tuple[str, ...] = (),
) -> Model:
    """Load a hub model, a local folder or a `.gguf` file, find its layout and prove it.

    `weights` is the commit of a hub model where it is known already, `folder` where its files were fetched to.
    """
    check_setting("dtype", dtype)
    where = _pick_device(device)
    if device_map is not None:
        _need(("accelerate",), "device_map")
    place = locate(name, revision)
    if place.repo is None or weights is None or not is_commit(weights):
        weights = hash_weights(name, revision=revision)
    if folder is not None:
        place = Source(path=folder)
    source: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if place.path is None:
        # By commit: a branch may move between here and the end of the download.
        source |= {"pretrained_model_name_or_path": place.repo, "revision": weights}
    elif place.is_gguf:
        source |= {"pretrained_model_name_or_path": str(place.path.parent), "gguf_file": place.path.name}
        _need(("gguf", "accelerate"), "Reading a .gguf file")
    else:
        source |= {"pretrained_model_name_or_path": str(place.path)}
        if not (place.path / "config.json").is_file():
            raise ModelError(f"{name} has no file config.json: is it the folder of a saved model?")
    with ExitStack() as stack:
        stack.enter_context(_quiet(bars=place.path is None))
        stack.enter_context(_explaining(name))
        if not trust_remote_code:
            stack.enter_context(_without_hub_kernels())
        from transformers import AutoConfig

        if place.path is None or place.path.is_dir():
            _refuse_adapter(name, source)
        config = AutoConfig.from_pretrained(**source)
        notes = [] if trust_remote_code else _pin_implementations(config)
        tokenizer = _load_tokenizer(name, source)
        loader, head = _loader_for(config, gguf=place.is_gguf)
        options = {
            "config": config,
            "dtype": getattr(torch, dtype),
            "device_map": device_map,
            "output_loading_info": True,
        }
        if place.path is not None and place.path.is_dir() and is_seed(place.path):
            module, info = _draw(loader, config, place.path, getattr(torch, dtype)), {"missing_keys": []}
        else:
            if not place.is_gguf:
                _refuse_pickle(name, place.path, allow_pickle)
                options |= {"use_safetensors": None if allow_pickle else True}
            module, info = loader.from_pretrained(**source, **{key: v for key, v in options.items() if v is not None})
        if device_map is None:
            module.to(where)
        module.eval()
        probe = make_probe(module, tokenizer)
        layout = discover_layout(module, probe, blocks=blocks, final_norm=final_norm)
    checks = ["Every weight that a state depends on was in the checkpoint."]
    if _check_complete(name, module, layout, probe, set(info["missing_keys"])):
        head = None
        notes.append("The language-model head has no weights in the checkpoint: no loss.")
    if place.is_gguf:
        notes.append("Weights were dequantised from GGUF.")
    return _assemble(name, module, tokenizer, layout, probe, head=head, weights=weights, notes=notes, checks=checks)


def _refuse_adapter(name: str, source: dict[str, Any]) -> None:
    """An adapter changes what its base model computes, and only where peft is installed."""
    from transformers.utils.peft_utils import find_adapter_config_file

    model, revision = source["pretrained_model_name_or_path"], source.get("revision")
    if find_adapter_config_file(model, revision=revision) is not None:
        raise ModelError(
            f"{name} holds a PEFT adapter (adapter_config.json), and its base model is elsewhere: merge it into that "
            "(merge_and_unload), save the result and measure it"
        )


# Ways to compute attention and experts that are part of torch and transformers; others are code that is downloaded.
_IMPLEMENTATIONS = {
    "_attn_implementation": (None, "eager", "sdpa"),
    "_experts_implementation": (None, "eager", "grouped_mm", "batched_mm"),
}


def _pin_implementations(config: Any) -> list[str]:
    """Reset attention and experts of a config, and of those inside it, to the default where they name other code."""
    from transformers import PretrainedConfig

    notes = []
    for name, known in _IMPLEMENTATIONS.items():
        wanted = getattr(config, name, None)
        if wanted not in known:
            # A string would be set in the configs inside as well.
            setattr(config, name, {"": None})
            notes.append(f"The config asks for {name.lstrip('_')} {wanted!r}; the default of transformers was used.")
    inside = [value for value in vars(config).values() if isinstance(value, PretrainedConfig)]
    return notes + [note for each in inside for note in _pin_implementations(each)]


@contextmanager
def _without_hub_kernels() -> Iterator[None]:
    """Refuse kernels from the hub, which are code: attention, experts and quantisation all load them through here."""
    from transformers.integrations import hub_kernels

    def refuse(kernel: str, *_: Any, **__: Any) -> None:
        raise ImportError(f"{kernel} is code from the hub: trust_remote_code=True")

    before = hub_kernels.get_kernel
    hub_kernels.get_kernel = refuse
    try:
        yield
    finally:
        hub_kernels.get_kernel = before


def _draw(loader: Any, config: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The weights that a training began with, from its seed."""
    seed = json.loads((folder / "seed.json").read_text("utf-8"))["seed"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return loader.from_config(config, dtype=torch.float32).to(dtype)


def adopt_model(
    module: nn.Module,
    tokenizer: Any,
    *,
    name: str,
    blocks: tuple[str, ...] = (),
    final_norm: tuple[str, ...] = (),
    in_training: bool = False,
) -> Model:
    """Take a module that is already in memory, find its layout and prove it; its training mode is left as it is.

    The weights of a model `in_training` are not hashed: they change at every step.
    """
    # Hooks added after the first compiled call never fire; those of the module underneath do.
    module = getattr(module, "_orig_mod", module)
    probe = make_probe(module, tokenizer)
    layout = discover_layout(module, probe, blocks=blocks, final_norm=final_norm)
    head = next(filter(None, (_head_of(base.__name__) for base in type(module).__mro__)), None)
    weights = None if in_training else _hash_module(module)
    return _assemble(name, module, tokenizer, layout, probe, head=head, weights=weights, notes=[], checks=[])


def _assemble(
    name: str,
    module: nn.Module,
    tokenizer: Any,
    layout: Layout,
    probe: Int[Tensor, "b t"],
    *,
    head: str | None,
    weights: str | None,
    notes: list[str],
    checks: list[str],
) -> Model:
    notes += _check_vocabulary(name, module, tokenizer)
    checks += verify_layout(module, layout, probe)
    if is_encoder_decoder(module):
        kind = "encoder-decoder"
    elif is_causal(module, layout, probe):
        kind = "decoder"
        checks.append("Changing later tokens leaves earlier states unchanged: a decoder.")
    else:
        kind = "encoder"
        checks.append("Changing later tokens changes earlier states: an encoder.")
    width, plain_head = _find_head(module, probe)
    if head == "causal" and kind == "encoder":
        head = None
        notes.append("It sees later tokens, so its next-token loss means nothing: no loss.")
    return Model(
        name=name,
        module=module,
        tokenizer=tokenizer,
        layout=layout,
        kind=kind,
        head=head,
        weights=weights,
        notes=tuple(notes),
        checks=tuple(checks),
        logits_width=width,
        plain_head=plain_head,
    )


def _find_head(module: nn.Module, probe: Int[Tensor, "b t"]) -> tuple[int, str | None]:
    """How wide the logits are, and the last linear module that is called, where its output is them bit by bit."""
    last: list[tuple[str, bool, Tensor]] = []

    def keep(path: str, _: nn.Module, args: Any, output: Any) -> None:
        by_position = len(args) == 1 and tuple(args[0].shape[:-1]) == tuple(probe.shape)
        # A copy: logits that are scaled or capped in place afterwards are others.
        last[:] = [(path, by_position, output.detach().clone())]

    linears = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.Linear)]
    handles = [part.register_forward_hook(partial(keep, path)) for path, part in linears]
    try:
        output = run_module(module, probe)
    finally:
        for handle in handles:
            handle.remove()
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or tuple(logits.shape[:2]) != tuple(probe.shape):
        return 0, None
    for path, by_position, made in last:
        if by_position and made.shape == logits.shape and torch.equal(made.to(logits.dtype), logits):
            return logits.shape[-1], path
    return logits.shape[-1], None


def embedding_rows(module: nn.Module) -> int | None:
    """How many token ids a model can read, where its input embedding is a table."""
    table = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None  # pyright: ignore[reportCallIssue]
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _check_vocabulary(name: str, module: nn.Module, tokenizer: Any) -> list[str]:
    """Refuse a tokenizer with ids that the embedding has no row for; a note where no text leads to them."""
    rows = embedding_rows(module)
    if rows is None or not hasattr(tokenizer, "get_vocab"):
        return []
    over = sorted((index, token) for token, index in tokenizer.get_vocab().items() if index >= rows)
    if not over:
        return []
    listed = ", ".join(f"{token!r} ({index})" for index, token in over[:4]) + (", ..." if len(over) > 4 else "")
    found = f"{len(over)} of the tokenizer's ids have no row in the embedding, which has {rows}: {listed}"
    unused = set(tokenizer.all_special_ids) - set(tokenizer("a")["input_ids"]) - {tokenizer.mask_token_id}
    if all(index in unused for index, _ in over):
        return [f"{found}. They are special tokens that ordinary text does not contain."]
    raise ModelError(
        f"{name}: {found}. Save the tokenizer that these weights were trained with, or resize the embedding "
        "(resize_token_embeddings)."
    )


def _hash_module(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for key, value in module.state_dict().items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise ModelError(f"the weights of {key} are offloaded and cannot be hashed: load the model by its name")
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _need(packages: tuple[str, ...], purpose: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingPackageError(package, extra="gguf", purpose=purpose)


def _pick_device(device: str) -> str:
    if device == "auto":
        # Apple's MPS has no float64, which distances and sums of squares need.
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise SpecError(f"device {device!r} cannot be used here: {error}") from error
    return device


def _head_of(architecture: str) -> str | None:
    if architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "masked" if architecture.endswith("ForMaskedLM") else None


def _loader_for(config: Any, *, gguf: bool) -> tuple[Any, str | None]:
    """The auto class for what was saved, and the loss its logits support."""
    import transformers

    architecture = (getattr(config, "architectures", None) or [""])[0]
    head = "causal" if gguf and not architecture else _head_of(architecture)
    if head is not None:
        return (transformers.AutoModelForCausalLM if head == "causal" else transformers.AutoModelForMaskedLM), head
    if architecture.endswith("ForConditionalGeneration"):
        if config.is_encoder_decoder:
            return transformers.AutoModelForSeq2SeqLM, None
        # Multimodal wrappers around a decoder: with text alone they are that decoder.
        if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            return transformers.AutoModelForCausalLM, "causal"
    # T5's encoder on its own is another class than T5.
    return (
        transformers.AutoModelForTextEncoding if architecture.endswith("EncoderModel") else transformers.AutoModel
    ), None


def _load_tokenizer(name: str, source: dict[str, Any]) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise
        text = " ".join(str(error).split())
        raise ModelError(f"{name} has no tokenizer that can be loaded: {text[:400]}") from error
    # Where its files are missing, transformers 5 makes a tokenizer that knows special tokens and nothing else.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise ModelError(f"{name} has no tokenizer: its vocabulary is empty. Save the tokenizer beside the weights.")
    return tokenizer


def _refuse_pickle(name: str, folder: Path | None, allow_pickle: bool) -> None:
    if folder is None or allow_pickle:
        return
    # An index of safetensors can name files of any kind.
    if not all(file.endswith(".safetensors") for file in weight_files(folder, list_files(folder))):
        raise ModelError(_PICKLED.format(name=name))


_PICKLED = (
    "{name} has no safetensors weights. Pickled weights can run code when they are loaded; "
    "if you trust their author, pass allow_pickle=True (--allow-pickle)."
)


def _check_complete(name: str, module: nn.Module, layout: Layout, probe: Int[Tensor, "b t"], missing: set[str]) -> bool:
    """Refuse a checkpoint that leaves any weight behind a state random; True where only the head is missing."""
    if not missing:
        return False
    trace = trace_module(module, probe)
    ends = [path for stack in layout.stacks for path in (stack.blocks[-1], stack.final_norm) if path is not None]
    last = trace.of(ends)[-1]
    early = {call.path for call in trace.calls if call.entered <= last.entered or call.path.startswith(f"{last.path}.")}
    late = {call.path for call in trace.calls} - early
    unused = {key for key in missing if "pooler" in key.split(".")}
    head = {key for key in missing - unused if key.rpartition(".")[0] in late or _parent(key) in late}
    needed = missing - unused - head
    random = sorted(needed - _computed_weights(module, needed))
    if random:
        raise ModelError(
            f"{name}: {len(random)} weights are missing from the checkpoint and would be random "
            f"({', '.join(random[:4])}{', ...' if len(random) > 4 else ''}). Does it belong to this config?"
        )
    return bool(head)


def _computed_weights(module: nn.Module, missing: set[str]) -> set[str]:
    """Those missing weights that are no result of training: frozen, and initialised without randomness.

    So are sinusoidal position embeddings, which several architectures do not store. A norm's gain begins at one as
    well, but is trained.
    """
    if not missing:
        return set()
    try:
        # A weight that was loaded, or should have been, does not say any more that it is frozen.
        with torch.device("meta"):
            declared = dict(type(module)(module.config).named_parameters())
    except Exception:
        # No model of transformers, or one that cannot be built without memory: all count as missing.
        return set()
    frozen = {key for key in missing if key in declared and not declared[key].requires_grad}
    return {key for key in frozen if _begins_the_same(module, key)}


def _begins_the_same(module: Any, key: str) -> bool:
    """Whether initialising a weight again, with other random numbers, gives the value it has."""
    path, _, name = key.rpartition(".")
    again = copy.deepcopy(module.get_submodule(path))
    weight = getattr(again, name)
    # A new parameter: transformers marks those that it need not initialise.
    setattr(again, name, nn.Parameter(torch.full_like(weight, torch.nan), requires_grad=False))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        module._init_weights(again)
    return torch.equal(getattr(again, name), weight)


def _parent(key: str) -> str:
    return key.rpartition(".")[0].rpartition(".")[0]


@contextmanager
def _explaining(name: str) -> Iterator[None]:
    """Errors of the libraries underneath, in one sentence each."""
    from safetensors import SafetensorError

    try:
        yield
    except AnisoscopeError:
        raise
    except SafetensorError as error:
        raise ModelError(f"{name}: its safetensors file is corrupt or cut short ({error}). Fetch it again.") from error
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name} does not fit on the device: try dtype bfloat16 or device_map='auto'") from error
    except Exception as error:
        text = " ".join(str(error).split())
        if "trust_remote_code" in text:
            text = "it runs code of its own; if you trust its author, pass trust_remote_code=True (--trust-remote-code)"
        elif "no file named model.safetensors" in text or "have a file named model.safetensors" in text:
            raise ModelError(_PICKLED.format(name=name)) from error
        raise ModelError(f"{name} cannot be loaded: {text[:400]}") from error


@contextmanager
def _quiet(*, bars: bool) -> Iterator[None]:
    """No remarks of transformers while loading, and bars only for a download; its settings are as before afterwards."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    # transformers switches the hub's bars with its own: where they differ, what was before could not be restored.
    hide = not bars and logging.is_progress_bar_enabled() and not are_progress_bars_disabled()
    logging.set_verbosity_error()
    if hide:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if hide:
            logging.enable_progress_bar()
