"""Flags that several commands share: what can change a number (fields of Spec), and what cannot."""

import inspect
import math
import tomllib
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from anisoscope.errors import SpecError
from anisoscope.inputs import read_text
from anisoscope.validation import CONTROLS, check_settings

Command = TypeVar("Command", bound=Callable[..., None])


def spec_flags(
    corpus: Annotated[
        str | None, typer.Option(help="pydoc, enwik8, a file or folder, hf:DATASET, or - for stdin.  [pydoc]")
    ] = None,
    metrics: Annotated[str | None, typer.Option(help="Estimators or families, with commas between them.")] = None,
    sites: Annotated[str | None, typer.Option(help="Such as embed,block.*,final_norm (patterns allowed).")] = None,
    populations: Annotated[
        str | None, typer.Option(help="Out of all, content, typical, types, matched.  [each metric's own]")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens to run through the model.  [65536]")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in a window.  [512]")] = None,
    batch_points: Annotated[int | None, typer.Option(help="Points a batch has at least.  [4096]")] = None,
    special_tokens: Annotated[
        bool | None, typer.Option("--special-tokens/--no-special-tokens", help="The tokenizer's own.  [on]")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Of the model's weights and states.  [float32]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of every random choice.  [0]")] = None,
    typical_k: Annotated[float | None, typer.Option(help="Norm limit of `typical`, in MADs.  [6]")] = None,
    discard_fraction: Annotated[float | None, typer.Option(help="Largest ratios TwoNN leaves out.  [0.1]")] = None,
    neighbors: Annotated[int | None, typer.Option(help="Neighbours of levina_bickel.  [20]")] = None,
    gride_scales: Annotated[str | None, typer.Option(help="Scales of gride.  [2,4,8,16,32,64]")] = None,
    isoscore_zeta: Annotated[float | None, typer.Option(help="Shrinkage of isoscore_star.  [0.25]")] = None,
    rank: Annotated[
        str | None,
        typer.Option(help="Directions of a tangent proxy; or by variance:0.9, participation_ratio, twonn.  [16]"),
    ] = None,
    curvature_rank: Annotated[int | None, typer.Option(help="Tangent directions of a curvature.  [4]")] = None,
    proxy: Annotated[
        str | None, typer.Option(help="Another tangent proxy beside pca and seminmf: svd, local_pca.")
    ] = None,
    gradients: Annotated[
        str | None, typer.Option(help="virtual, activation, embedding, linear:PATH.  [the first two]")
    ] = None,
    controls: Annotated[
        str | None, typer.Option(help="type_disjoint, shuffled_targets, paper_normals, shares.")
    ] = None,
    blocks: Annotated[str | None, typer.Option(help="Path of the block list, where it is not found.")] = None,
    final_norm: Annotated[str | None, typer.Option(help="Path of the final norm, where it is not found.")] = None,
) -> dict[str, Any]:
    """Fields of Spec that were given."""
    given = {
        "corpus": corpus,
        "metrics": words(metrics, "--metrics"),
        "sites": words(sites, "--sites"),
        "populations": words(populations, "--populations"),
        "tokens": tokens,
        "seq_len": seq_len,
        "batch_points": batch_points,
        "special_tokens": special_tokens,
        "dtype": dtype,
        "seed": seed,
        "typical_k": typical_k,
        "discard_fraction": discard_fraction,
        "neighbors": neighbors,
        "gride_scales": _numbers(gride_scales),
        "isoscore_zeta": isoscore_zeta,
        "rank": _number_or_rule(rank),
        "curvature_rank": curvature_rank,
        "proxy": proxy,
        "gradients": words(gradients, "--gradients"),
        "controls": words(controls, "--controls"),
        "blocks": words(blocks, "--blocks"),
        "final_norm": words(final_norm, "--final-norm"),
    }
    given = {name: value for name, value in given.items() if value is not None}
    check_settings(given)
    if variants := [name for name in given.get("controls", ()) if name not in CONTROLS]:
        raise SpecError(f"--controls takes {', '.join(CONTROLS)}; got {', '.join(variants)}")
    return given


def run_flags(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread a model over devices and memory (accelerate).")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Windows in a forward pass; halved when memory runs out.")] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code that comes from the hub.")
    ] = False,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Load pickled weights where there are no safetensors.")
    ] = False,
) -> dict[str, Any]:
    """How to run a model: nothing here changes a number."""
    return {
        "device": device,
        "device_map": device_map,
        "batch_size": _batch_size(batch_size),
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
    }


# A TOML file of flags has a few hundred bytes.
CONFIG_BYTES = 1 << 20


def read_config(context, path):
    """Let a TOML file give the defaults of a command's flags and arguments.

    Typer hands these two over by place, since neither has a type: the context's class is a private one of its own.
    """
    if path is None:
        return None
    try:
        given = tomllib.loads(read_text(path, at_most=CONFIG_BYTES))
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{path} is not valid TOML: {error}") from error
    names = {word.lstrip("-").replace("-", "_"): item for item in context.command.params for word in item.opts}
    names |= {"model": names["models"]} if "models" in names else {}
    unknown = sorted(key for key in given if key.replace("-", "_") not in names)
    if unknown:
        raise typer.BadParameter(f"{path} has keys that are no flags of {context.info_name}: {', '.join(unknown)}")
    context.default_map = {}
    for key, value in given.items():
        item = names[key.replace("-", "_")]
        values = value if isinstance(value, list) else [value]
        hint = inspect.signature(context.command.callback).parameters[item.name].annotation
        for one in values:
            _check_type(f"{path}: {key}", one, hint)
        several = item.multiple or item.nargs == -1
        # Flags that take several words want them with commas between.
        context.default_map[str(item.name)] = (
            values if several else ",".join(map(str, values)) if values != [value] else value
        )
    return path


def _check_type(what: str, value: Any, hint: Any) -> None:
    """Refuse a TOML value of another type than its flag: parsing it would make `true` the number 1."""
    found = _types_in(hint)
    for kind, accepted in {bool: (bool,), int: (int,), float: (int, float)}.items():
        if kind in found:
            wanted, fits = kind.__name__, isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
            break
    else:
        wanted, fits = "text", isinstance(value, str | int | float) and not isinstance(value, bool)
    if not fits:
        raise typer.BadParameter(f"{what} must be of type {wanted}; got {value!r}")


def _types_in(hint: Any) -> set[Any]:
    """The classes in a type hint: of `Annotated[list[int] | None, ...]` list, int and None."""
    inside = typing.get_args(hint)
    if hasattr(hint, "__metadata__"):
        return _types_in(inside[0])
    return {hint}.union(*map(_types_in, inside)) if inside else {hint}


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which pass every comparison with a bound: a callback of flags."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def above_zero(value: float | None) -> float | None:
    """Refuse what is not a finite number above 0: a callback of flags."""
    return above_zero_or_inf(finite(value))


def above_zero_or_inf(value: float | None) -> float | None:
    """Refuse nan and numbers that are not above 0, where inf means no limit: a callback of flags."""
    if value is not None and not value > 0:
        raise typer.BadParameter(f"{value} is not above 0.")
    return value


def takes(*shared: Callable[..., Any]) -> Callable[[Command], Command]:
    """Give a command the flags of these functions too; they reach it as keyword arguments."""

    def extend(command: Command) -> Command:
        own = inspect.signature(command)
        added = [parameter for function in shared for parameter in inspect.signature(function).parameters.values()]
        kept = [item for item in own.parameters.values() if item.kind is not inspect.Parameter.VAR_KEYWORD]
        # Flags, then what every command ends with: its output, --json, --debug.
        last = [item for item in kept if item.name in ("output", "as_json", "debug")]
        first = [item for item in kept if item not in last]
        # Typer reads both.
        command.__signature__ = own.replace(parameters=[*first, *added, *last])  # pyright: ignore[reportFunctionMemberAccess]
        command.__annotations__ = {
            **{name: hint for function in shared for name, hint in function.__annotations__.items()},
            **command.__annotations__,
        }
        return command

    return extend


def pick(flags: dict[str, Any], function: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    """What one of the shared functions makes of its part of the flags."""
    return function(**{name: flags[name] for name in inspect.signature(function).parameters})


def words(text: str | None, flag: str = "a list") -> tuple[str, ...] | None:
    """What stands between commas."""
    if text is None:
        return None
    found = tuple(word.strip() for word in text.split(",") if word.strip())
    if not found:
        raise SpecError(f"{flag} takes one or more words with commas between them; got {text!r}: leave it out instead")
    return found


def _numbers(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(word) for word in words(text, "--gride-scales") or ())
    except SpecError:
        raise
    except ValueError as error:
        raise SpecError(f"--gride-scales takes whole numbers with commas between them; got {text!r}") from error


def _number_or_rule(text: str | None) -> int | str | None:
    """The rank: `16` is a number, `variance:0.9` a rule."""
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        size = int(text)
    except ValueError:
        size = 0
    if size < 1:
        raise SpecError(f"--batch-size must be auto or a whole number of at least 1; got {text!r}; example: 8")
    return size
