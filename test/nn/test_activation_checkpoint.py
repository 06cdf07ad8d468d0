"""checkpoint_module: the same numbers as without, random masks included. One and two ranks."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from test.common.garbage import is_freed
from test.common.models import FEATURES
from test.common.ranks import cached_outcome, run_on_ranks


class Calls:
    """A number of calls, recomputations included, as it is no attribute of a module."""

    def __init__(self) -> None:
        self.number = 0

    def next(self) -> int:
        self.number += 1
        return self.number


class Dropping(nn.Module):
    """Dropout around its layer; counts its forwards; takes keywords, returns a container."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        count = self.calls.next()
        hidden = self.drop(torch.tanh(self.lin(self.drop(x)))) * scale
        return {"out": hidden, "count": count}


class HostRandom(nn.Module):
    """Draws from the host's generator in forward (stochastic depth does)."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) * torch.rand(()).item()


class Fickle(nn.Module):
    """Does something else when it is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x) if self.calls.next() == 1 else torch.tanh(self.lin(x))


class Cache:
    """An object that is not known to be a container."""

    def __init__(self) -> None:
        self.entries: list[Tensor] = []


class Hoarding(nn.Module):
    """Appends to a cache, as attention does; the recomputation finds it longer."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.cache = Cache()

    def forward(self, x: Tensor) -> Tensor:
        self.cache.entries.append(self.lin(x))
        (only,) = self.cache.entries
        return only


class Counting(nn.Module):
    """Changes its buffers or attributes in forward, and computes with them."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("run", torch.ones(FEATURES))
        self.register_buffer("other", None)
        self.register_buffer("seen", torch.zeros(0))
        self.change = change
        self.steps, self.average = 0, None
        self.notes: list[Tensor] = []
        self.sums: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return torch.tanh(self.lin(x)) * self.run.clone()


def _assigned(module: Any) -> None:
    module.run = module.run * 0.5


def _made(module: Any) -> None:
    module.run = module.run * 0.5
    module.other = module.run * 2 if module.other is None else module.other * module.run
    module.run = module.run + module.other


def _in_place(module: Any) -> None:
    module.run.mul_(0.5)


def _both(module: Any) -> None:
    module.run.mul_(0.5)
    module.run = module.run + 1
    module.run.mul_(0.75)


def _registered(module: Any) -> None:
    number = len(list(module.buffers()))
    module.register_buffer(f"more{number}", module.run * number)
    module.run = module.run + getattr(module, f"more{number}")


def _attributes(module: Any) -> None:
    before = torch.ones_like(module.run) if module.average is None else module.average
    module.average, module.steps = before * 0.5, module.steps + 1
    module.run = module.average / module.steps


def _attribute_in_place(module: Any) -> None:
    if module.average is None:
        module.average = torch.ones_like(module.run)
    module.average.mul_(0.5)
    module.run = module.run * module.average


def _containers(module: Any) -> None:
    module.notes.append(module.run * 0.5)
    total = module.sums.setdefault("all", torch.zeros_like(module.run))
    total.add_(module.notes[-1] / len(module.notes))
    module.run = total + 0.5


def _resized(module: Any) -> None:
    """As observers of torch.ao do, which ``prepare_qat`` puts into a model."""
    now = module.run * 0.5 if module.seen.numel() == 0 else module.seen + module.run
    module.seen.resize_(now.shape)
    module.seen.copy_(now)
    module.run.add_(module.seen)


CHANGES = {
    "assigned": _assigned,
    "made": _made,
    "in place": _in_place,
    "both": _both,
    "registered": _registered,
    "attributes": _attributes,
    "attribute in place": _attribute_in_place,
    "containers": _containers,
    "resized": _resized,
}


def _buffers(device: torch.device, x: Tensor) -> dict[str, list[Any]]:
    """Gradients and buffers of two steps that call a module twice, by how it changes buffers; first
    the plain module's."""
    import torch_xla

    from xla_fsdp import checkpoint_module

    def steps(module: nn.Module) -> Any:
        outer, given = nn.Sequential(module).to(device), x.clone().requires_grad_()
        for _ in range(2):
            first = outer(given)
            loss = outer(first).sum()
            with torch.no_grad():
                module.run.mul_(3.0)
            loss.backward()
        torch_xla.sync()
        tensors = {**dict(outer.named_buffers()), "grad": given.grad}
        grads = {name: param.grad for name, param in outer.named_parameters()}
        return {name: tensor.cpu() for name, tensor in {**tensors, **grads}.items()}

    found: dict[str, list[Any]] = {}
    for name, change in CHANGES.items():
        torch.manual_seed(0)
        plain = Counting(change)
        ways = [copy.deepcopy(plain), checkpoint_module(copy.deepcopy(plain))]
        found[name] = [steps(way) for way in ways]
        inner = checkpoint_module(copy.deepcopy(plain))
        found[name].append(steps(checkpoint_module(_Calling(inner))))
        found[name][-1] = {n.replace("inner.", ""): t for n, t in found[name][-1].items()}
    return found


class _Calling(nn.Module):
    """Calls another module."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    @property
    def run(self) -> Tensor:
        return self.inner.run

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class _Remembering(nn.Module):
    """Changes a tensor in place that has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = self.lin(x)
        self.memory.mul_(0.5).add_(x)
        return torch.tanh(self.lin(x)) * self.memory.clone()


def _memories(device: torch.device, x: Tensor) -> list[list[Tensor]]:
    """What two calls leave in the memory, and gradients; of the plain module and recomputed."""
    from xla_fsdp import checkpoint_module

    found = []
    plain = _Remembering().to(device)
    for module in (copy.deepcopy(plain), checkpoint_module(copy.deepcopy(plain))):
        (module(x) + module(x)).sum().backward()
        found.append([each.detach().cpu() for each in (module.memory, module.lin.weight.grad)])
    return found


class _Computing(nn.Module):
    """Runs what is pending, as operators do that torch_xla computes on the host."""

    def forward(self, x: Tensor) -> Tensor:
        import torch_xla

        torch_xla.sync()
        return x


def _computed_statistics(device: torch.device, x: Tensor) -> bool:
    """Whether statistics that are computed before the forward ends are changed once."""
    from xla_fsdp import checkpoint_module

    found = []
    for way in (lambda module: module, checkpoint_module):
        norm = nn.BatchNorm1d(FEATURES)
        module = way(nn.Sequential(norm, _Computing())).to(device)
        module(x.reshape(-1, FEATURES)).square().sum().backward()
        found.append(norm.running_mean.cpu())
    return bool(torch.equal(*found)) and bool(found[0].any())


class _SavingItsBuffer(nn.Module):
    """Autograd saves the buffer that it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("run", torch.ones(FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        self.run.mul_(0.5)
        return x * self.run


def _saved_buffer(device: torch.device, x: Tensor) -> list[float]:
    """The gradient of the first of two calls, and the buffer after it."""
    from xla_fsdp import checkpoint_module

    module = checkpoint_module(_SavingItsBuffer().to(device))
    given = x.clone().requires_grad_()
    first = module(given)
    module(x)
    first.sum().backward()
    return [given.grad.max().item(), module.run.max().item()]


class Outer(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        from xla_fsdp import checkpoint_module

        wrap = checkpoint_module if checkpointed else (lambda module: module)
        self.parts = nn.ModuleList([wrap(Dropping()), wrap(Dropping())])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x, scale=2.0)["out"]
        return x


def on_one_rank(rank: int) -> dict[str, Any]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    device = torch_xla.device()
    x = torch.linspace(-1, 1, 4 * FEATURES).reshape(4, FEATURES).to(device)

    def train(model: nn.Module, data: Tensor, seed: int = 11) -> dict[str, Tensor]:
        """Gradients of two steps, and what the device's generator draws afterwards."""
        xm.set_rng_state(seed)
        for _ in range(2):
            output = model(data)
            output = output["out"] if isinstance(output, dict) else output
            output.square().sum().backward()
        after = torch.rand(3, device=device).cpu()
        grads = {n: p.grad.cpu() for n, p in model.named_parameters()}
        return {"after": after, "output": output.detach().cpu(), **grads}

    def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
        return found.keys() == expected.keys() and all(
            torch.allclose(found[name], expected[name], atol=1e-6) for name in expected
        )

    torch.manual_seed(0)
    plain = Dropping().to(device)
    expected = train(copy.deepcopy(plain), x)
    module = checkpoint_module(copy.deepcopy(plain))
    results: dict[str, Any] = {
        "same object": module is checkpoint_module(module),
        "masks": same(train(checkpoint_module(copy.deepcopy(plain)), x), expected),
    }
    counted = checkpoint_module(copy.deepcopy(plain))
    train(counted, x)
    results["forwards"] = counted.calls.number
    with torch.no_grad():
        counted(x)
    results["forwards without grad"] = counted.calls.number

    by_hand = copy.deepcopy(plain)
    copied = copy.deepcopy(checkpoint_module(by_hand))
    with torch.no_grad():
        copied.lin.weight.zero_()
    results["copies"] = by_hand.lin.weight.abs().sum().item() > 0 and same(
        train(checkpoint_module(copy.deepcopy(by_hand)), x), expected
    )

    needs_grad = x.clone().requires_grad_()
    train(checkpoint_module(copy.deepcopy(plain)), needs_grad)
    wanted = x.clone().requires_grad_()
    train(copy.deepcopy(plain), wanted)
    results["input gradient"] = torch.allclose(needs_grad.grad.cpu(), wanted.grad.cpu())

    torch.manual_seed(1)
    nest = Outer(checkpointed=False).to(device)
    results["nested"] = same(
        train(_nest_like(nest, checkpoint_module), x), train(copy.deepcopy(nest), x)
    )
    results["nested in a unit"] = same(
        train(XlaFullyShardedDataParallel(_nest_like(nest, checkpoint_module)), x),
        train(XlaFullyShardedDataParallel(copy.deepcopy(nest)), x),
    )

    torch.manual_seed(2)
    host = HostRandom().to(device)
    torch.manual_seed(3)
    wanted_host = train(copy.deepcopy(host), x)
    next_wanted = torch.rand(2)
    torch.manual_seed(3)
    results["host masks"] = same(train(checkpoint_module(copy.deepcopy(host)), x), wanted_host)
    results["host state"] = torch.equal(torch.rand(2), next_wanted)

    autocast = checkpoint_module(copy.deepcopy(plain))
    with torch.autocast("xla", dtype=torch.bfloat16):
        xm.set_rng_state(11)
        loss = autocast(x)["out"].float().square().sum()
    loss.backward()
    results["autocast"] = bool(autocast.lin.weight.grad.isfinite().all().item())

    retained = checkpoint_module(copy.deepcopy(plain))
    xm.set_rng_state(11)
    loss = retained(x)["out"].square().sum()
    loss.backward(retain_graph=True)
    once = retained.lin.weight.grad.cpu()
    loss.backward()
    results["second backward"] = torch.allclose(retained.lin.weight.grad.cpu(), 2 * once)

    results["buffers"] = _buffers(device, x)
    results["computed statistics"] = _computed_statistics(device, x)
    results["saved buffer"] = _saved_buffer(device, x)
    results["memories"] = _memories(device, x)
    results["inputs are gone"] = _inputs_are_gone(checkpoint_module(copy.deepcopy(plain)), x)
    results["selective"] = _selective(device, x)
    results["gathers"] = {
        name: _gathers(wrap_block, wrap_all, device)
        for name, (wrap_block, wrap_all) in NESTS.items()
    }
    results["fickle"] = _message(lambda: train(checkpoint_module(Fickle().to(device)), x))
    results["hoarding"] = _message(lambda: train(checkpoint_module(Hoarding().to(device)), x))
    results["not a module"] = _message(lambda: checkpoint_module(print))
    return results


def _nest_like(plain: nn.Module, checkpoint_module: Any) -> nn.Module:
    """The same weights, with checkpoints inside a checkpoint."""
    nest = copy.deepcopy(plain)
    for part in nest.parts:
        checkpoint_module(part)
    return checkpoint_module(nest)


class Deep(nn.Module):
    """Blocks of two layers, a third of which are blocks of their own."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES, FEATURES)
        self.inner = Deep(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.lin(x))
        return x if self.inner is None else x + self.inner(x)


class _Recording:
    """The engine of torch; its callbacks stay, as where a thread is late with giving them up."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.callbacks = engine, []  # type: ignore[var-annotated]

    def queue_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)
        self.engine.queue_callback(callback)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def _inputs_are_gone(module: nn.Module, x: Tensor) -> bool:
    """Whether callbacks of a backward pass that is over keep no inputs: alive when a step ends,
    they would be outputs of its program."""
    from torch.autograd import Variable

    engine = _Recording(Variable._execution_engine)
    with mock.patch.object(Variable, "_execution_engine", engine):
        given = x * 2
        kept = weakref.ref(given)
        loss = module(given)["out"].square().sum()
        del given
        before = kept() is not None
        loss.backward()
        del loss
    return before and len(engine.callbacks) > 0 and is_freed(kept)


def _selective(device: torch.device, x: Tensor) -> dict[str, Any]:
    """Forwards of each of four blocks in one step, and what is refused."""
    from xla_fsdp import checkpoint_wrapper, fully_shard

    def blocks() -> nn.Sequential:
        return nn.Sequential(*(_Counting() for _ in range(4))).to(device)

    def calls(model: Any) -> list[int]:
        model(x).sum().backward()
        return [block.calls.number for block in model]

    def in_place(model: nn.Sequential) -> nn.Sequential:
        for block in model:
            fully_shard(block)
        return model

    def is_block(module: nn.Module) -> bool:
        return isinstance(module, _Counting)

    single = _Counting().to(device)
    return {
        "all": calls(checkpoint_wrapper(blocks(), is_block)),
        "every second": calls(checkpoint_wrapper(blocks(), is_block, every=2)),
        "sharded in place": calls(checkpoint_wrapper(in_place(blocks()), is_block)),
        "itself": checkpoint_wrapper(single) is single,
        "every 0": _message(lambda: checkpoint_wrapper(blocks(), is_block, every=0)),
        "nothing": _message(lambda: checkpoint_wrapper(blocks(), lambda m: False)),
    }


class _Counting(nn.Linear):
    """Counts its forwards."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        self.calls = Calls()

    def forward(self, input: Tensor) -> Tensor:
        self.calls.next()
        return torch.tanh(super().forward(input))


def _fsdp(module: nn.Module, **options: Any) -> nn.Module:
    from xla_fsdp import XlaFullyShardedDataParallel

    return XlaFullyShardedDataParallel(module, **options)


def _inside(module: nn.Module, **options: Any) -> nn.Module:
    from xla_fsdp import checkpoint_module

    return _fsdp(checkpoint_module(module), **options)


def _outside(module: nn.Module, **options: Any) -> nn.Module:
    from xla_fsdp import checkpoint_module

    return checkpoint_module(_fsdp(module, **options))


NESTS = {
    "none": (_fsdp, _fsdp),
    "inside": (_inside, _inside),
    "outside": (_outside, _outside),
    "outer only": (_fsdp, _outside),
    "inner only": (_outside, _fsdp),
    "mixed": (_inside, _outside),
}


def _gathers(wrap_inner: Any, wrap_outer: Any, device: torch.device) -> list[int]:
    """All-gathers of each of three units, one inside the other, in one step."""
    from xla_fsdp import LocalCollectives

    class Counting(LocalCollectives):
        def __init__(self) -> None:
            super().__init__(0, 2)
            self.gathers = 0

        def all_gather(self, operand: Tensor) -> Tensor:
            self.gathers += 1
            return super().all_gather(operand)

    counted = [Counting() for _ in range(3)]
    model = Deep()
    options = {"disable_reshard_on_root": False}
    middle = model.inner
    middle.inner = wrap_inner(middle.inner, collectives=counted[2], **options)
    model.inner = wrap_inner(middle, collectives=counted[1], **options)
    root = wrap_outer(model, collectives=counted[0], **options)
    root(torch.ones(2, FEATURES, device=device)).sum().backward()
    return [each.gathers for each in counted]


class _Meeting(HostRandom):
    """Is recomputed while the other rank draws, if that is not prevented."""

    RAN, DRAWING, RECOMPUTING, DREW = (threading.Event() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.RAN.is_set():
            self.RECOMPUTING.set()
            assert self.DREW.wait(60)
        return super().forward(x)


def one_draws_meanwhile(rank: int) -> list[Tensor]:
    """Rank 0 recomputes a forward that draws on the host; rank 1 draws a model's values."""
    import torch_xla

    from xla_fsdp import checkpoint_module, one_rank_at_a_time

    if rank == 0:
        device = torch_xla.device()
        output = checkpoint_module(_Meeting()).to(device)(torch.ones(2, FEATURES, device=device))
        _Meeting.RAN.set()
        assert _Meeting.DRAWING.wait(60)
        output.sum().backward()
        return []
    assert _Meeting.RAN.wait(60)
    with one_rank_at_a_time():
        torch.manual_seed(3)
        first = torch.rand(3)
        _Meeting.DRAWING.set()
        _Meeting.RECOMPUTING.wait(1)  # in vain, as rank 0 waits for this rank
        second = torch.rand(3)
    _Meeting.DREW.set()
    return [first, second]


def _message(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "nothing was raised"


@cached_outcome
def result() -> dict[str, Any]:
    return run_on_ranks(on_one_rank, 1)[0]


@pytest.mark.parametrize(
    "what",
    [
        "same object",
        "masks",
        "copies",
        "input gradient",
        "nested",
        "nested in a unit",
        "host masks",
        "host state",
        "computed statistics",
        "autocast",
        "second backward",
        "inputs are gone",
    ],
)
def test_same_as_without(what: str) -> None:
    assert result()[what]


def test_a_recomputation_waits_for_a_rank_that_draws_its_model() -> None:
    drawn = torch.cat(run_on_ranks(one_draws_meanwhile, 2)[1])
    torch.testing.assert_close(drawn, torch.rand(6, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("change", CHANGES)
def test_state_is_changed_once_and_is_that_of_the_forward(change: str) -> None:
    plain, checkpointed, nested = result()["buffers"][change]
    torch.testing.assert_close(checkpointed, plain)
    torch.testing.assert_close(nested, plain)


def test_a_saved_buffer_has_the_value_of_its_own_forward() -> None:
    assert result()["saved buffer"] == [0.5, 0.25]


def test_a_memory_with_a_graph_is_changed_once() -> None:
    plain, recomputed = result()["memories"]
    torch.testing.assert_close(recomputed, plain)


def test_forward_runs_again_in_backward_only() -> None:
    assert result()["forwards"] == 4  # two steps, each forward and recomputation
    assert result()["forwards without grad"] == 5


def test_a_forward_that_changes_its_mind_is_an_error() -> None:
    assert "must do the same both times" in result()["fickle"]


def test_an_error_in_the_recomputation_says_where_it_comes_from() -> None:
    assert result()["hoarding"].startswith("ValueError: too many values to unpack")
    assert "forward of Hoarding was recomputed, in backward" in result()["hoarding"]
    assert "use_cache=False" in result()["hoarding"]


def test_only_modules() -> None:
    assert result()["not a module"].startswith("TypeError: checkpoint_module takes an nn.Module")


def test_only_selected_modules_are_recomputed() -> None:
    found = result()["selective"]
    assert found["all"] == [2, 2, 2, 2]
    assert found["every second"] == [2, 1, 2, 1]
    assert found["sharded in place"] == [2, 2, 2, 2]
    assert found["itself"]
    assert found["every 0"].startswith("ValueError: every is 0; give 1 for all selected")
    assert found["nothing"].startswith("ValueError: predicate selected none of the modules in Seq")


@pytest.mark.parametrize("nest", NESTS)
def test_units_in_units_gather_once_in_forward_and_once_in_backward(nest: str) -> None:
    assert result()["gathers"][nest] == [2, 2, 2]
