"""The lab's nouns: what to train (`Recipe`), what came of it (`Trained`); and small models and tokenizers.

Nothing heavy is imported before a model or tokenizer is built: a command line can read the defaults at once.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from anisoscope.atomic import write_file
from anisoscope.corpora import Corpus
from anisoscope.errors import SpecError
from anisoscope.large_files import lengths_of

VOCABULARY = 2048
# Characters of the corpus a tokenizer of that size learns from: enough for it, read in about a second.
TOKENIZER_CHARACTERS = 1_000_000
LAYOUTS = {"gpt_neox": "decoder", "bert": "encoder", "eurobert": "encoder"}


_CHOICES = {
    "kind": ("decoder", "encoder"),
    "dtype": ("auto", "float32", "bfloat16"),
    "tied": (None, True, False),
    "compiled": (True, False),
}
_WHOLE_NUMBERS: Mapping[str, tuple[int, float]] = {
    "layers": (1, math.inf),
    "width": (8, math.inf),
    "heads": (1, math.inf),
    # 256 bytes and the special tokens.
    "vocabulary": (261, math.inf),
    "seq_len": (4, math.inf),
    "batch_size": (1, math.inf),
    "steps": (1, math.inf),
    "warmup": (0, math.inf),
    "checkpoints": (2, math.inf),
    "log_every": (1, math.inf),
    "held_out_tokens": (1, math.inf),
    # What numpy's global generator takes.
    "seed": (0, 2**32 - 1),
}
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: value > 0, "a number above 0, such as 0.001"),
    "weight_decay": (lambda value: value >= 0, "a number of at least 0"),
    "gradient_clip": (lambda value: value >= 0, "a number of at least 0 (0: no clipping)"),
    "dropout": (lambda value: 0 <= value < 1, "a share: at least 0 and below 1"),
    "mask_rate": (lambda value: 0 < value < 1, "a share: above 0 and below 1"),
    "sampling_exponent": (lambda value: True, "a finite number"),
}
# Fields of a Recipe that `anisoscope train` has no flag for.
_NO_FLAG = ("weight_decay", "gradient_clip", "mask_rate", "log_every", "held_out_tokens")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that can change the weights of a training. The same recipe gives the same bits on the same CPU."""

    kind: str = "decoder"
    """`decoder` (predicts the next token) or `encoder` (predicts masked tokens)."""
    layout: str | None = None
    """`gpt_neox` (decoder, pre-norm), `bert` (encoder, post-norm), `eurobert` (encoder, pre-norm); None: the first."""
    layers: int = 6
    width: int = 128
    heads: int = 4
    tied: bool | None = None
    """Whether the head is the embedding; None: as the family has it (BERT tied, the others not)."""
    dropout: float = 0.0
    corpus: str = "pydoc"
    """Whatever `load_corpus` reads. Every 50th document is held out."""
    vocabulary: int = VOCABULARY
    """Entries of the byte-level BPE that is learned from the corpus."""
    seq_len: int = 256
    batch_size: int = 32
    """Windows of `seq_len` tokens in one step."""
    steps: int = 2000
    learning_rate: float = 1e-3
    """At the end of warm-up; it falls along a cosine to a tenth."""
    warmup: int = 100
    """Steps in which the learning rate rises evenly from its first fraction. It is never 0."""
    weight_decay: float = 0.1
    """Not for norms and biases."""
    gradient_clip: float = 1.0
    mask_rate: float = 0.15
    """Encoders: share of the tokens to be predicted. 80 % of them are masked, 10 % replaced, 10 % left as they are."""
    sampling_exponent: float = 1.0
    """A type of frequency f is learned from as if its frequency were f to this power; see `sampling`."""
    regularize: Mapping[str, float] = field(default_factory=dict)
    """Metric -> weight: added to the loss, measured on the states after the final norm. See `penalties`."""
    dtype: str = "auto"
    """`float32`, or `bfloat16` (autocast; weights stay float32); auto: bfloat16 on a GPU, float32 on a CPU."""
    compiled: bool = False
    """Train with `torch.compile`: a minute to begin with, and faster from then on where a GPU waits for memory."""
    checkpoints: int = 12
    """How many to keep: step 0, the last, and others evenly between them in log step."""
    log_every: int = 50
    """Steps between two rows of losses.jsonl; every checkpoint has a row too."""
    held_out_tokens: int = 65536
    """At most so many are evaluated at a checkpoint."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what cannot be trained: every type and range, before anything is written."""
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                self._refuse(name, " or ".join(map(str, choices)))
        if self.layout is not None and (not isinstance(self.layout, str) or LAYOUTS.get(self.layout) != self.kind):
            fitting = ", ".join(name for name, kind in LAYOUTS.items() if kind == self.kind)
            raise SpecError(f"the layout of this {self.kind} is one of {fitting}; came {self.layout!r}")
        for name, (least, most) in _WHOLE_NUMBERS.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                limit = f"from {least} to {most}" if most < math.inf else f"of at least {least}"
                self._refuse(name, f"a whole number {limit}")
        for name, (fits, wanted) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_finite(value) or not fits(value):
                self._refuse(name, wanted)
        if self.width % (8 * self.heads):
            raise SpecError(
                f"a head's width is a multiple of 8; {self.width} cannot be divided among {self.heads} heads: "
                f"--width {8 * self.heads * max(1, round(self.width / (8 * self.heads)))} can"
            )
        if not isinstance(self.corpus, str) or not self.corpus.strip():
            self._refuse("corpus", "the name of a corpus, such as pydoc, or a file or folder")
        if not isinstance(self.regularize, Mapping) or not all(map(_is_finite, self.regularize.values())):
            self._refuse("regularize", "METRIC=WEIGHT with finite weights, such as leading_variance=0.1")

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        flag = {"compiled": "--compile"}.get(name, f"--{name.replace('_', '-')}")
        where = "" if name in _NO_FLAG else f" ({flag} on the command line)"
        raise SpecError(f"{name}{where} is {wanted}; came {getattr(self, name)!r}")

    @property
    def family(self) -> str:
        """The layout, chosen or given."""
        return self.layout or ("gpt_neox" if self.kind == "decoder" else "bert")

    @property
    def tokens_per_step(self) -> int:
        """How many tokens a step reads."""
        return self.batch_size * self.seq_len


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One row of the loss curve, in nats per predicted token."""

    step: int
    tokens: int
    train: float | None
    """Mean over the steps since the row before: what was minimised, without penalties. None before the first step."""
    held_out: float | None
    """Unweighted, on the held-out documents; only at checkpoints."""
    penalty: float | None = None
    """Mean of the weighted penalties since the row before."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What came of a training, or of the part that is done."""

    recipe: Recipe
    output: Path
    finished: bool
    step: int
    tokens: int
    losses: tuple[Loss, ...]
    unigram: float
    """What counting tokens alone loses on the held-out text, in nats per token."""
    bigram: float
    """The same, knowing the token before (interpolated Kneser-Ney)."""
    seconds: float
    """Training, evaluation and saving, over all parts."""
    checkpoints: tuple[Path, ...]
    sampling_exponent: float
    """As achieved; NaN before the first step."""
    void: str | None
    """Why the run says nothing about its sampling exponent, or None."""


def checkpoint_steps(steps: int, count: int) -> tuple[int, ...]:
    """Step 0, step 1, the last, and others evenly between them in log step: `count` in all, where there are as many.

    >>> checkpoint_steps(1000, 8)
    (0, 1, 3, 10, 32, 100, 316, 1000)
    >>> checkpoint_steps(3, 8)
    (0, 1, 2, 3)
    """
    if count >= steps + 1:
        return tuple(range(steps + 1))
    if count == 2:
        return (0, steps)
    # Early steps fall together: spread more than wanted until enough different ones are left.
    for spread in range(count - 1, 100 * count):
        found = {round(steps ** (place / (spread - 1))) for place in range(spread)} if spread > 1 else {steps}
        if len(found) >= count - 1:
            break
    else:
        raise SpecError(f"{count} checkpoints cannot be spread over {steps} steps")
    ordered = sorted(found)
    while len(ordered) > count - 1:
        del ordered[-2]
    return (0, *ordered)


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """A model with random weights and a tokenizer learned from the corpus."""

    name: str
    module: Any
    tokenizer: Any


def build_untrained(kind: Literal["decoder", "encoder"], corpus: Corpus, *, seed: int = 0) -> Untrained:
    """A pre-norm causal decoder or a post-norm bidirectional encoder, 6 blocks of width 128, never trained."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    if kind not in ("decoder", "encoder"):
        raise SpecError(f"kind is decoder or encoder; came {kind!r}")
    tokenizer = train_tokenizer(corpus, kind)
    # The random state of whoever calls is left as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "decoder":
            module: torch.nn.Module = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=VOCABULARY,
                    n_layer=6,
                    n_embd=128,
                    n_head=4,
                    n_positions=512,
                    bos_token_id=tokenizer.bos_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                )
            )
        else:
            module = BertForMaskedLM(
                BertConfig(
                    vocab_size=VOCABULARY,
                    num_hidden_layers=6,
                    hidden_size=128,
                    num_attention_heads=4,
                    intermediate_size=512,
                    max_position_embeddings=512,
                )
            )
    return Untrained(name=f"untrained-{kind}", module=module.eval(), tokenizer=tokenizer)


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """The module of a recipe, with the random weights of its seed."""
    import torch
    import transformers

    size: dict[str, Any] = {
        "vocab_size": recipe.vocabulary,
        "hidden_size": recipe.width,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "intermediate_size": 4 * recipe.width,
        "max_position_embeddings": recipe.seq_len,
        "tie_word_embeddings": recipe.family == "bert" if recipe.tied is None else recipe.tied,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if recipe.family == "gpt_neox":
        dropout: dict[str, Any] = {"hidden_dropout": recipe.dropout, "attention_dropout": recipe.dropout}
        config: Any = transformers.GPTNeoXConfig(**size, **dropout)
        build: Any = transformers.GPTNeoXForCausalLM
    elif recipe.family == "bert":
        dropout = {"hidden_dropout_prob": recipe.dropout, "attention_probs_dropout_prob": recipe.dropout}
        config, build = transformers.BertConfig(**size, **dropout), transformers.BertForMaskedLM
    else:
        # Its gated MLP has three matrices where the others have two: two thirds of the width, for as many weights.
        size |= {"intermediate_size": 8 * round(recipe.width / 3), "mask_token_id": tokenizer.mask_token_id}
        config = transformers.EuroBertConfig(**size, attention_dropout=recipe.dropout)
        build = transformers.EuroBertForMaskedLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return build(config)


def train_tokenizer(
    corpus: Corpus, kind: Literal["decoder", "encoder"], *, vocabulary: int = VOCABULARY, seq_len: int | None = None
) -> Any:
    """A byte-level BPE; an encoder's sequences begin with [CLS] and end with [SEP]. `seq_len` is its stated limit."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if kind == "encoder" else ["<|endoftext|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(corpus, vocabulary), trainer)
    limit: dict[str, Any] = {} if seq_len is None else {"model_max_length": seq_len}
    if kind == "decoder":
        return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[0], **limit)
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]", **limit
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save under the class name that every version of transformers knows: version 5 writes one that only it has."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    if settings["tokenizer_class"] == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        write_file(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")


def _sample(corpus: Corpus, vocabulary: int) -> list[str]:
    """Documents spread evenly over the corpus, up to the character limit, which grows with the vocabulary."""
    total = int(lengths_of(corpus.documents).sum())
    stride = max(1, total // (TOKENIZER_CHARACTERS * max(1, vocabulary // VOCABULARY)))
    return [str(document) for document in corpus.documents[::stride]]
