"""Are checkpoints what their names say? Their files tell, without loading and, on the hub, without downloading.

Found: different steps with identical weights, among them a first step that equals the end; weight files shared with
another step; missing files; a step that the Trainer's own notes contradict. Not found: weights that are wrong in other
ways, and the same weights saved in another format.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from anisoscope.errors import CheckpointError
from anisoscope.records import Checkpoint

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d+)-of-(?P<count>\d+)(?P<suffix>\.\w+)")


@dataclass(frozen=True, kw_only=True)
class Verified:
    """Checkpoints and what is wrong with them."""

    checkpoints: tuple[Checkpoint, ...]
    """As they were given; `suspect` says what was found."""

    @property
    def findings(self) -> tuple[str, ...]:
        """One sentence for each suspicious checkpoint."""
        return tuple(f"{item.name}: {item.suspect}" for item in self.checkpoints if item.suspect)

    def check(self) -> None:
        """Stop where something was found."""
        if self.findings:
            listed = "\n  ".join(self.findings)
            raise CheckpointError(
                f"{len(self.findings)} of {len(self.checkpoints)} checkpoints are not what their names say:\n  {listed}"
                "\nNothing was measured. Leave them out, or go on with --no-verify: their records will be marked."
            )


def verify(series: Sequence[Checkpoint], *, ends: Sequence[Checkpoint] = ()) -> Verified:
    """Compare the files of a model's checkpoints, given in order of training and inspected already.

    `ends` shows how the whole run ends, where that is not among them: its last checkpoint, `main`; both at its step.
    """
    ends = ends or series[-1:]
    marked = []
    for item in series:
        known = [item.suspect] if item.suspect else []
        faults = [*known, *_missing_files(item, series), *_shared_weights(item, series, ends)]
        marked.append(replace(item, suspect="; ".join(faults) or None))
    return Verified(checkpoints=tuple(marked))


def _missing_files(item: Checkpoint, series: Sequence[Checkpoint]) -> list[str]:
    names = {file.name for file in item.files}
    weights = sorted(file.name for file in item.files if file.sha256)
    if not weights:
        return ["it has no weight files"]
    found = []
    shards = [shard for shard in map(_SHARD.fullmatch, weights) if shard]
    for stem, count, suffix in sorted({shard.group("stem", "count", "suffix") for shard in shards}):
        wanted = [f"{stem}-{number:0{len(count)}}-of-{count}{suffix}" for number in range(1, int(count) + 1)]
        if gone := [name for name in wanted if name not in names]:
            found.append(f"{len(gone)} of {int(count)} shards are missing ({', '.join(gone[:3])})")
    # What all others of the run have beside their weights, this one should have as well.
    others = [{file.name for file in other.files} for other in series if other is not item]
    common = set.intersection(*others) if others else set()
    needed = {name for name in common if name.startswith(("config.json", "tokenizer", "vocab", "merges"))}
    if not weights[0].endswith(".gguf"):
        needed.add("config.json")
    return found + [f"{name} is missing" for name in sorted(needed - names)]


def _shared_weights(item: Checkpoint, series: Sequence[Checkpoint], ends: Sequence[Checkpoint]) -> list[str]:
    """Weights this checkpoint has in common with another step."""
    mine = _weights(item)
    others = [other for other in (*ends, *series) if _weights(other) and not _same_step(item, other)]
    twins = [other for other in others if _weights(other) == mine]
    at_end = any(_same_step(item, end) for end in ends)
    # Where others have the weights of the end, the end is where they belong.
    if mine and twins and not at_end:
        if twins[0] in ends:
            return [f"it has the weights of the end of the run ({twins[0].revision})"]
        more = f" and {len(twins) - 4} more" if len(twins) > 4 else ""
        return [f"it has the same weights as {', '.join(str(twin.revision) for twin in twins[:4])}{more}"]
    for other in others:
        shared = mine & _weights(other)
        if shared and mine != _weights(other):
            return [f"{len(shared)} of its {len(mine)} weight files are those of {other.revision}"]
    return []


def _weights(item: Checkpoint) -> frozenset[str]:
    return frozenset(file.sha256 for file in item.files if file.sha256)


def _same_step(one: Checkpoint, two: Checkpoint) -> bool:
    """A checkpoint itself, or another name of its step: these may well have equal weights."""
    return one.revision == two.revision or (one.step is not None and (one.stage, one.step) == (two.stage, two.step))
