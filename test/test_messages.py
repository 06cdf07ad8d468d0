"""Mistakes of a first hour: each is answered by the line to write."""

from __future__ import annotations

import io
import json
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.ranks import cached_outcome, run_python
from xla_fsdp.distributed.launcher import launch
from xla_fsdp.distributed.whole_lines import whole_lines

RANKS = 2
WIDTH = 8
LINES = 40


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))


def sharded() -> Any:
    from test.common.scenarios import fsdp

    model = build()
    model[0] = fsdp(model[0])
    return fsdp(model)


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    import torch_xla

    model = sharded()
    optimizer = torch.optim.Adam(model.parameters())
    model(rows()).sum().backward()
    optimizer.step()
    torch_xla.sync()
    return model, optimizer


def of_rank_0(rank: int, save: Callable[[Any], None]) -> None:
    """Run ``save``, whose warning is ignored, on rank 0 alone."""
    import torch_xla.core.xla_model as xm

    if rank == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            save(rank)
    xm.rendezvous("saved")


def rows() -> Tensor:
    import torch_xla

    return torch.ones(2, WIDTH).to(torch_xla.device())


# ---------------------------------------------------------------- mistakes that a rank makes


def target_on_the_host(rank: int, folder: str) -> None:
    F.mse_loss(sharded()(rows()), torch.zeros(2, 4)).backward()


def misspelt(rank: int, folder: str) -> None:
    from xla_fsdp import XlaFullyShardedDataParallel

    XlaFullyShardedDataParallel(build(), reshard_after_foward=False)


def unknown(rank: int, folder: str) -> None:
    from xla_fsdp import XlaFullyShardedDataParallel

    XlaFullyShardedDataParallel(build(), zero=3)


def saved_on_one_rank(rank: int, folder: str) -> None:
    from xla_fsdp import save_checkpoint

    model = sharded()
    if rank == 0:
        save_checkpoint(folder, model, step=1)


def shards_on_one_rank(rank: int, folder: str) -> None:
    model = sharded()
    if rank == 0:
        torch.save({"model": model.state_dict()}, f"{folder}/one.pth")


def shards_in_safetensors(rank: int, folder: str) -> None:
    from safetensors.torch import save_file

    model = sharded()
    if rank == 0:
        save_file(model.state_dict(), f"{folder}/one.safetensors")


def shards_pickled(rank: int, folder: str) -> None:
    model = sharded()
    if rank == 0:
        with Path(folder, "one.pickle").open("wb") as file:
            pickle.dump({"model": model.state_dict()}, file)


def shards_saved_by_the_serializer(rank: int, folder: str) -> None:
    import torch_xla.utils.serialization as xser

    xser.save(sharded().state_dict(), f"{folder}/model.xser", master_only=True)


def shards_deep_inside(rank: int, folder: str) -> None:
    state = sharded().state_dict()
    if rank == 0:
        torch.save({"epoch": 1, "states": [state]}, f"{folder}/deep.pth")


def moving_average(rank: int, folder: str) -> None:
    from xla_fsdp import fully_shard

    model: Any = fully_shard(build())
    state = {name: 0.9 * value + 0.1 * value for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save({name: value.half() for name, value in state.items()}, f"{folder}/ema.pth")


def shards_as_extra(rank: int, folder: str) -> None:
    from xla_fsdp import save_checkpoint

    model = sharded()
    save_checkpoint(f"{folder}/extra", model, step=1, extra={"ema": model.state_dict()})


def rows_copied_to_the_host(rank: int, folder: str) -> None:
    from xla_fsdp import fully_shard

    model: Any = fully_shard(build())
    state = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    if rank == 0:
        torch.save(state, f"{folder}/rows.pth")


def model_as_an_object(rank: int, folder: str) -> None:
    model = sharded()
    if rank == 0:
        torch.save({"model": model.module}, f"{folder}/object.pth")


def optimizer_on_one_rank(rank: int, folder: str) -> None:
    _model, optimizer = trained()
    state = optimizer.state_dict()
    if rank == 0:
        torch.save({"optimizer": state}, f"{folder}/optimizer.pth")


def optimizer_as_an_object(rank: int, folder: str) -> None:
    _model, optimizer = trained()
    if rank == 0:
        torch.save(optimizer, f"{folder}/optimizer_object.pth")


def optimizers_in_one_file(rank: int, folder: str) -> None:
    _model, optimizer = trained()
    content = {"optimizer": optimizer.state_dict(), "shard_metadata": {}}
    torch.save(content, f"{folder}/shared_optimizer.pth")


def optimizer_by_the_master(rank: int, folder: str) -> None:
    import torch_xla.core.xla_model as xm

    _model, optimizer = trained()
    xm.save(optimizer.state_dict(), f"{folder}/master.pth")


def shards_in_one_file(rank: int, folder: str) -> None:
    model = sharded()
    content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torch.save(content, f"{folder}/shared.pth")


def shards_as_the_model(rank: int, folder: str) -> None:
    import torch_xla.core.xla_model as xm

    xm.save(sharded().state_dict(), f"{folder}/model.pth")


def read_on_one_rank(rank: int, folder: str) -> None:
    import torch_xla

    loss = sharded()(rows()).sum()
    if rank == 0:
        loss.item()
    loss.backward()
    torch_xla.sync()


def uneven(rank: int, folder: str) -> None:
    import torch_xla

    model = sharded()
    for _ in range(2 - rank):
        model(rows()).sum().backward()
        torch_xla.sync()


def uneven_before_saving(rank: int, folder: str) -> None:
    import torch_xla

    from xla_fsdp import full_state_dict

    model = sharded()
    for _ in range(2 - rank):
        model(rows()).sum().backward()
        torch_xla.sync()
    full_state_dict(model)


def in_ddp(rank: int, folder: str) -> None:
    nn.parallel.DistributedDataParallel(sharded())


def loaded_inside(rank: int, folder: str) -> None:
    sharded().module.load_state_dict(build().state_dict())


def shards_in_a_plain_model(rank: int, folder: str) -> None:
    path = f"{folder}/rank-{rank}.pth"
    model = sharded()
    content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
    torch.save({**content, "model": model.state_dict()}, path)
    build().load_state_dict(torch.load(path)["model"])


def copies_in_a_plain_model(rank: int, folder: str) -> None:
    path, state = f"{folder}/copies-{rank}.pth", sharded().state_dict()
    content = {"model": {name: value.cpu() for name, value in state.items()}}
    torch.save({**content, "shard_metadata": {}}, path)
    build().load_state_dict(torch.load(path)["model"])


def shards_of_another_rank(rank: int, folder: str) -> None:
    path, model = f"{folder}/rank-0-alone.pth", sharded()
    of_rank_0(rank, lambda _: torch.save(model.state_dict(), path))
    model.load_state_dict(torch.load(path))


def optimizer_of_another_rank(rank: int, folder: str) -> None:
    path, (_model, optimizer) = f"{folder}/optimizer-0-alone.pth", trained()
    of_rank_0(rank, lambda _: torch.save(optimizer.state_dict(), path))
    optimizer.load_state_dict(torch.load(path))


def model_of_another_rank(rank: int, folder: str) -> None:
    path, model = f"{folder}/object-0-alone.pth", sharded()
    of_rank_0(rank, lambda _: torch.save(model, path))
    torch.load(path, weights_only=False)


MISTAKES: dict[Callable[..., None], tuple[str, ...]] = {
    target_on_the_host: ("Expected XLA tensor", "target.to(torch_xla.device())"),
    misspelt: ("XlaFullyShardedDataParallel", "did you mean reshard_after_forward?"),
    unknown: ("XlaFullyShardedDataParallel has no option zero; there are auto_wrap_policy,",),
    saved_on_one_rank: ("inside `if rank == 0:` (save_checkpoint,",),
    shards_on_one_rank: ("rank 0's shards", "xla_fsdp.full_state_dict(model), which all ranks"),
    shards_deep_inside: ("torch.save was given rank 0's shards", "save_checkpoint"),
    moving_average: ("torch.save was given rank 0's shards", "save_checkpoint"),
    shards_as_extra: ("extra holds rank", "Save whole tensors"),
    rows_copied_to_the_host: ("torch.save was given rank 0's shards", "save_checkpoint"),
    model_as_an_object: ("torch.save was given rank 0's shards", "save_checkpoint"),
    optimizer_on_one_rank: ("torch.save was given rank 0's shards", "save_checkpoint"),
    optimizer_as_an_object: ("torch.save was given rank 0's shards", "save_checkpoint"),
    optimizers_in_one_file: ("one would be lost", "save_checkpoint(folder, model"),
    optimizer_by_the_master: ("others' shards are lost", "master_only=False"),
    shards_in_safetensors: ("safetensors.torch was given", "rank 0's shards", "save_checkpoint"),
    shards_pickled: ("pickle.dump was given", "rank 0's shards", "save_checkpoint"),
    shards_saved_by_the_serializer: ("others' shards are lost", "full_state_dict"),
    shards_in_one_file: ("one would be lost", "save_checkpoint(folder, model", "-{rank}.pth"),
    shards_as_the_model: ("others' shards are lost", "full_state_dict", "master_only=False"),
    read_on_one_rank: ("no collective on ranks [0]", "loss.item()"),
    uneven: ("ranks [0] wait", "a batch more than the others'", "DistributedSampler"),
    uneven_before_saving: ("the ranks differ", "a batch more than the others'", "drop_last=True"),
    in_ddp: ("Leave it out, gradients are averaged already",),
    loaded_inside: ("size mismatch for 2.weight", "model.load_state_dict(state), not"),
    copies_in_a_plain_model: ("as one rank's shards", "consolidate_sharded_ckpts"),
    shards_of_another_rank: ("rank 0 of 2, and this rank loads the shards of rank 1", "on as many"),
    optimizer_of_another_rank: ("rank 0 of 2, and this rank loads the shards of rank 1",),
    model_of_another_rank: ("the shards of rank 0 of 2, and rank 1 of 2 loads it", "full_state"),
    shards_in_a_plain_model: ("holds one rank's shards", "consolidate_sharded_ckpts"),
}


def said(mistake: Callable[..., None], folder: str) -> str:
    """Return what a run says that makes a mistake; warnings are errors."""
    try:
        launch(mistake, (folder,), num_ranks=RANKS)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def memory(rank: int) -> dict[str, int]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    found: Any = xm.get_memory_info(torch_xla.device())
    return found


def saved_by_one_of_the_replicas(rank: int, folder: str) -> None:
    """Nothing to warn of: all of them hold the whole model."""
    from xla_fsdp import fully_shard, init_mesh

    path = f"{folder}/replica.pth"
    model: Any = fully_shard(build(), mesh=init_mesh((RANKS, 1), ("replica", "shard")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if rank == 0:
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, path)
    import torch_xla.core.xla_model as xm

    xm.rendezvous("saved")
    loaded = torch.load(path)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def loss_of_a_step(rank: int) -> dict[str, Tensor]:
    return {"loss": sharded()(rows()).sum()}


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {each.__name__: said(each, folder) for each in MISTAKES}
    found["replicas"] = said(saved_by_one_of_the_replicas, folder)
    losses = launch(loss_of_a_step, num_ranks=RANKS)
    found["losses"] = [each["loss"].item() for each in losses]
    return {**found, "memory": launch(memory, num_ranks=RANKS)}


@cached_outcome
def results(folder: Path) -> dict[str, Any]:
    code = f"import json, {__name__} as t; print(json.dumps(t.everything({str(folder)!r})))"
    done = run_python("-W", "error::UserWarning", "-c", code)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return results(tmp_path_factory.mktemp("messages"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.__name__)
def test_a_mistake_is_answered_by_what_to_write(
    found: dict[str, Any], mistake: Callable[..., None]
) -> None:
    message = found[mistake.__name__]
    assert [words for words in MISTAKES[mistake] if words not in message] == [], message


def test_what_is_no_mistake_is_not_warned_of(found: dict[str, Any]) -> None:
    assert found["replicas"] == "nothing was raised"


def test_the_memory_of_cpu_ranks_is_that_of_the_process(found: dict[str, Any]) -> None:
    for each in found["memory"]:
        assert 0 < each["bytes_used"] <= each["peak_bytes_used"] < each["bytes_limit"]


def test_a_loss_that_a_rank_returns_has_its_value(found: dict[str, Any]) -> None:
    expected = build()(torch.ones(2, WIDTH)).sum().item()
    assert found["losses"] == pytest.approx([expected] * RANKS, rel=1e-5)


def test_launch_is_given_a_function_of_the_rank() -> None:
    for wrong, args in ((lambda: None, ()), (lambda rank: None, ("more",))):
        with pytest.raises(TypeError, match=r"launch calls <lambda>\(rank.*as in def <lambda>"):
            launch(wrong, args, num_ranks=RANKS)


# ---------------------------------------------------------------- what is printed


def test_launch_says_that_it_starts_one_rank_and_keeps_no_programs() -> None:
    code = "from xla_fsdp import launch; launch(print, compile_cache='cache')"
    unset = {"XLA_FSDP_NUM_RANKS": "", "CPU_NUM_DEVICES": ""}
    done = run_python("-c", code, env=unset)
    assert done.returncode == 0, done.stderr
    assert "launch(fn, num_ranks=8), or XLA_FSDP_NUM_RANKS=8" in done.stderr
    assert "compile_cache is left out, as a CPU cannot read" in done.stderr
    assert "starts one rank" not in run_python("-c", code, env={"XLA_FSDP_NUM_RANKS": "1"}).stderr


class Pieces(io.StringIO):
    """Notes each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


def test_lines_of_threads_do_not_cut_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Pieces()
    monkeypatch.setattr("sys.stdout", stream)
    together = threading.Barrier(2)

    def talk(number: int) -> None:
        for line in range(LINES):
            print(number, end="", flush=False)
            together.wait()  # now both have begun a line
            print("", line)

    with whole_lines():
        threads = [threading.Thread(target=talk, args=(number,)) for number in range(2)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        print("begun", end="", flush=True)
        assert stream.writes[-1] == "begun"
        print("not ended", end="")
    print()
    expected = sorted(f"{number} {line}\n" for number in range(2) for line in range(LINES))
    assert sorted(stream.writes[: 2 * LINES]) == expected
    assert stream.getvalue().endswith("begunnot ended\n")
