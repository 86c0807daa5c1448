"""Small models built on the spot, offline: for the demo, and to try things on."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from anisoscope.corpora import Corpus
from anisoscope.errors import SpecError

VOCABULARY = 2048
# Characters of the corpus a small tokenizer learns from: enough for 2,048 entries, read in about a second.
TOKENIZER_CHARACTERS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """A model with random weights and a tokenizer learned from the corpus."""

    name: str
    module: torch.nn.Module
    tokenizer: Any


def build_untrained(kind: Literal["decoder", "encoder"], corpus: Corpus, *, seed: int = 0) -> Untrained:
    """A pre-norm causal decoder or a post-norm bidirectional encoder, 6 blocks of width 128, never trained."""
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


def train_tokenizer(corpus: Corpus, kind: Literal["decoder", "encoder"]) -> Any:
    """A byte-level BPE of 2,048 entries; an encoder's sequences begin with [CLS] and end with [SEP]."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"] if kind == "encoder" else ["<|endoftext|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(corpus), trainer)
    if kind == "decoder":
        return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=special[0], eos_token=special[0])
    bpe.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", special.index("[CLS]")), ("[SEP]", special.index("[SEP]"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]"
    )


def _sample(corpus: Corpus) -> list[str]:
    """Documents spread evenly over the corpus, up to the character limit."""
    total = sum(len(document) for document in corpus.documents)
    stride = max(1, total // TOKENIZER_CHARACTERS)
    return list(corpus.documents[::stride])
