"""The hub of the tests, seen by the ordinary client: what it gives, and what the client does when it misbehaves."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub import Hub

REPO = "lab/tiny"
WEIGHTS = bytes(range(256)) * 4000
OTHER = WEIGHTS[::-1]

# The last line is what `result` was, or the names of the exception's class and of those above it.
CLIENT = """
import json, sys
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
api, result = HfApi(), None
try:
    exec(sys.argv[1])
    print(json.dumps({"result": result}))
except Exception as error:
    print(json.dumps({"raised": [kind.__name__ for kind in type(error).__mro__]}))
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with Hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def ask(hub: Hub, tmp_path: Path) -> Ask:
    """Run the client's code in a process of its own, as a sweep would."""

    def ask(code: str, **environment: str) -> dict[str, Any]:
        command = [sys.executable, "-c", CLIENT, code]
        env = {**os.environ, **hub.environment(tmp_path / "home"), **environment}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return ask


def add_steps(hub: Hub) -> dict[str, str]:
    """Two checkpoints with the same weights, a tag with others."""
    files = {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "deep/er/notes.txt": b"notes"}
    return {
        "step1": hub.add(REPO, "step1", files),
        "step2": hub.add(REPO, "step2", {**files, "config.json": b'{"a": 2}'}),
        "v1": hub.add(REPO, "v1", {"model.safetensors": OTHER}, kind="tag"),
    }


def contents(folder: str) -> dict[str, bytes]:
    root = Path(folder)
    files = (path for path in root.rglob("*") if path.is_file() and ".cache" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_refs_name_branches_and_tags_with_their_commits(hub: Hub, ask: Ask) -> None:
    commits = add_steps(hub)
    seen = ask(
        f"refs = api.list_repo_refs({REPO!r})\n"
        "result = [{ref.name: ref.target_commit for ref in kind} for kind in (refs.branches, refs.tags)]"
    )["result"]
    assert seen[0].keys() == {"main", "step1", "step2"}
    assert seen[0]["step1"] == commits["step1"]
    assert seen[1] == {"v1": commits["v1"]}
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in commits.values())
    assert len(set(commits.values())) == 3


def test_a_commit_depends_on_names_and_contents_only(tmp_path: Path) -> None:
    one, two = Hub(tmp_path / "one"), Hub(tmp_path / "two")
    assert add_steps(one) == add_steps(two)
    assert one.add(REPO, "step1", {"config.json": b"{}"}) != one.add(REPO, "step1", {"config.json": b"[]"})


def test_a_tree_tells_hashes_and_sizes_and_no_weights_are_sent(hub: Hub, ask: Ask) -> None:
    commits = add_steps(hub)
    seen = ask(
        f"tree = list(api.list_repo_tree({REPO!r}, revision={commits['step1']!r}, recursive=True))\n"
        "files = [entry for entry in tree if hasattr(entry, 'size')]\n"
        "result = {f.path: [f.size, f.blob_id, f.lfs and f.lfs.sha256, f.lfs and f.lfs.size] for f in files}\n"
        f"info = api.model_info({REPO!r}, revision='step1', files_metadata=True)\n"
        "assert info.sha == " + repr(commits["step1"]) + "\n"
        "assert {s.rfilename: s.size for s in info.siblings} == {f.path: f.size for f in files}\n"
        f"some = api.get_paths_info({REPO!r}, ['model.safetensors', 'none'], revision='step1')\n"
        "assert [entry.lfs.sha256 for entry in some] == [result['model.safetensors'][2]]"
    )["result"]
    assert seen["model.safetensors"][0] == len(WEIGHTS)
    assert seen["model.safetensors"][2:] == [hashlib.sha256(WEIGHTS).hexdigest(), len(WEIGHTS)]
    # What `git hash-object` says of these five bytes.
    assert seen["deep/er/notes.txt"] == [5, hashlib.sha1(b"blob 5\0notes").hexdigest(), None, None]
    assert hub.downloads() == []


def test_long_listings_come_in_pages(hub: Hub, ask: Ask) -> None:
    hub.page = 3
    hub.add(REPO, "step1", {f"part{k}.safetensors": b"x" for k in range(8)})
    for name in ("lab/a", "lab/b", "lab/c"):
        hub.add(name, "main", {"config.json": b"{}"})
    tree = f"api.list_repo_tree({REPO!r}, revision='step1', expand=True)"
    assert ask(f"result = [len(list({tree})), len(list(api.list_models()))]")["result"] == [8, 4]
    assert sum("cursor=" in path for _, path, _ in hub.requests) == 3


def test_models_are_found_by_author_and_name(hub: Hub, ask: Ask) -> None:
    for name in ("lab/Pythia-1", "lab/pythia-2", "lab/other", "labour/pythia-3"):
        hub.add(name, "main", {"config.json": b"{}"})
    seen = ask("result = [model.id for model in api.list_models(author='lab', search='pythia')]")["result"]
    assert seen == ["lab/Pythia-1", "lab/pythia-2"]


def test_a_snapshot_is_the_same_bytes_and_shared_blobs_are_sent_once(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    commits = add_steps(hub)
    code = f"result = [snapshot_download({REPO!r}, revision=r) for r in ({commits['step1']!r}, 'step2', 'v1')]"
    one, two, tag = map(contents, ask(code)["result"])
    assert one == {"config.json": b'{"a": 1}', "model.safetensors": WEIGHTS, "deep/er/notes.txt": b"notes"}
    assert two == {**one, "config.json": b'{"a": 2}'}
    assert tag == {"model.safetensors": OTHER}
    assert len(hub.downloads("*/model.safetensors")) == 2
    assert len(list((hub.folder / "blobs").iterdir())) == 6


def test_a_snapshot_in_a_folder_of_its_own(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    commits = add_steps(hub)
    where = tmp_path / "here"
    code = f"result = snapshot_download({REPO!r}, revision={commits['step1']!r}, local_dir={str(where)!r})"
    assert contents(ask(code)["result"])["model.safetensors"] == WEIGHTS
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    ask(code)
    assert len(hub.downloads("*.safetensors")) == 1


def test_a_model_loads_by_name_and_revision(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_layer=2, n_embd=16, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    sums = {}
    for step in ("step1", "step2"):
        model.save_pretrained(tmp_path / "saved")
        hub.add(REPO, step, {path.name: path for path in (tmp_path / "saved").iterdir()})
        sums[step] = model.transformer.wte.weight.double().sum().item()
        model.transformer.wte.weight.data.mul_(2)
    seen = ask(
        "from transformers import AutoModelForCausalLM\n"
        f"load = lambda step: AutoModelForCausalLM.from_pretrained({REPO!r}, revision=step)\n"
        "result = {s: load(s).transformer.wte.weight.double().sum().item() for s in ('step1', 'step2')}"
    )["result"]
    assert seen == sums
    assert sums["step2"] == 2 * sums["step1"] != 0


def test_parts_of_a_file(hub: Hub) -> None:
    import urllib.error
    import urllib.request

    commits = add_steps(hub)

    def part(asked: str) -> tuple[int, str, bytes]:
        address = f"{hub.endpoint}/{REPO}/resolve/{commits['v1']}/model.safetensors"
        with urllib.request.urlopen(urllib.request.Request(address, headers={"Range": asked})) as reply:
            return reply.status, reply.headers["Content-Range"], reply.read()

    size = len(OTHER)
    assert part("bytes=10-19") == (206, f"bytes 10-19/{size}", OTHER[10:20])
    assert part(f"bytes={size - 3}-") == (206, f"bytes {size - 3}-{size - 1}/{size}", OTHER[-3:])
    with pytest.raises(urllib.error.HTTPError, match="416"):
        part(f"bytes={size}-")


def test_what_is_not_there(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    wanted = {
        "snapshot_download('lab/none')": "RepositoryNotFoundError",
        "api.list_repo_refs('lab/none')": "RepositoryNotFoundError",
        "snapshot_download('lab/tiny', revision='step9')": "RevisionNotFoundError",
        "list(api.list_repo_tree('lab/tiny', revision='a' * 40))": "RevisionNotFoundError",
        "hf_hub_download('lab/tiny', 'none.json', revision='step1')": "RemoteEntryNotFoundError",
    }
    seen = {code: ask(code)["raised"] for code in wanted}
    assert {code: raised[0] for code, raised in seen.items()} == wanted
    assert all("OSError" in raised for raised in seen.values())


def test_what_was_removed_is_not_there(hub: Hub, ask: Ask) -> None:
    commits = add_steps(hub)
    hub.remove(REPO, "step1", "config.json")
    hub.remove(REPO, "step2")
    assert ask(f"hf_hub_download({REPO!r}, 'config.json', revision='step1')")["raised"][0] == "RemoteEntryNotFoundError"
    gone = ask(f"snapshot_download({REPO!r}, revision={commits['step2']!r})")
    assert gone["raised"][0] == "RevisionNotFoundError"
    hub.remove(REPO)
    assert ask(f"api.model_info({REPO!r})")["raised"][0] == "RepositoryNotFoundError"


DOWNLOAD = f"result = snapshot_download({REPO!r}, revision='step1')"


def test_a_slow_download_takes_its_time(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.slow("*.safetensors", bytes_per_second=len(WEIGHTS) / 1.5)
    start = time.monotonic()
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == WEIGHTS
    assert time.monotonic() - start > 1.5


def test_a_download_that_was_cut_off_is_begun_again(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.break_once("*.safetensors", after_bytes=5000)
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == WEIGHTS
    # Less than the client's 10 MiB had come, so nothing was kept of it.
    statuses = [status for method, path, status in hub.requests if method == "GET" and "safetensors" in path]
    assert statuses == [200, 200]


def test_a_long_download_that_was_cut_off_goes_on_where_it_was(hub: Hub, ask: Ask) -> None:
    large = WEIGHTS * 14
    hub.add(REPO, "step1", {"model.safetensors": large})
    hub.break_once("*.safetensors", after_bytes=len(large) - 100)
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == large
    statuses = [status for method, path, status in hub.requests if method == "GET" and "safetensors" in path]
    assert statuses == [200, 206]


def test_a_download_that_is_always_cut_off_fails_and_leaves_no_half_file(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    add_steps(hub)
    hub.break_always("*.safetensors", after_bytes=5000)
    seen = ask(DOWNLOAD)
    assert seen["raised"][0] == "RemoteProtocolError"
    assert "OSError" not in seen["raised"]
    assert len(hub.downloads("*.safetensors")) == 6
    assert not [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size >= 5000]
    hub.heal()
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == WEIGHTS
    assert len(hub.downloads("*/config.json")) == 1


def test_a_reset_is_not_tried_again_by_the_client(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.break_once("*.safetensors", after_bytes=5000, reset=True)
    seen = ask(DOWNLOAD)
    assert seen["raised"][0] == "ReadError"
    assert "OSError" not in seen["raised"]
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == WEIGHTS


def test_wrong_bytes_of_the_right_length_are_not_noticed_by_the_client(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.corrupt("*.safetensors")
    came = contents(ask(DOWNLOAD)["result"])["model.safetensors"]
    assert len(came) == len(WEIGHTS)
    assert came[:-1] == WEIGHTS[:-1]
    assert came != WEIGHTS
    hub.heal()
    # Nor is the file looked at again, unless asked.
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == came
    found = ask(f"result = [bad['path'] for bad in api.verify_repo_checksums({REPO!r}, revision='step1').mismatches]")
    assert found["result"] == ["model.safetensors"]


def test_a_busy_hub_is_asked_again_for_files_but_not_for_refs(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.refuse("*.safetensors", 503, times=1)
    assert contents(ask(DOWNLOAD)["result"])["model.safetensors"] == WEIGHTS
    hub.refuse("api/*", 503, times=1)
    assert ask(f"api.list_repo_refs({REPO!r})")["raised"][0] == "HfHubHTTPError"


def test_a_hub_that_hangs(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.hang("api/*", seconds=2)
    assert ask(f"api.model_info({REPO!r}, timeout=0.2)")["raised"][0] == "ReadTimeout"
    # Refs have no timeout, whatever the environment says: the client waits as long as it takes.
    assert ask(f"result = len(api.list_repo_refs({REPO!r}).tags)", HF_HUB_DOWNLOAD_TIMEOUT="1")["result"] == 1


def test_a_hub_that_is_down_refuses_and_comes_back_at_the_same_address(hub: Hub, ask: Ask) -> None:
    add_steps(hub)
    hub.stop()
    seen = ask(f"api.list_repo_refs({REPO!r})")
    assert seen["raised"][0] == "ConnectError"
    assert "OSError" not in seen["raised"]
    hub.start()
    assert "result" in ask(f"api.list_repo_refs({REPO!r})")


def test_a_folder_is_served_by_hand(tmp_path: Path) -> None:
    import urllib.request

    path = tmp_path / "lab" / "tiny" / "step1" / "deep" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    command = [sys.executable, str(Path(__file__).with_name("hub.py")), str(tmp_path)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip().removeprefix("export HF_ENDPOINT=")
        assert server.stdout.readline().strip() == REPO
        with urllib.request.urlopen(f"{endpoint}/{REPO}/resolve/step1/deep/config.json") as reply:
            assert reply.read() == b"{}"
    finally:
        server.terminate()
        server.communicate()
