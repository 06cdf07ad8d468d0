"""Styles, layouts, losses and parameters of tensor parallelism, one by one, on two ranks."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import tempfile
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.common.hlo import Program
from test.common.scenarios import Scenarios, fsdp, make, message
from test.common.tensor_models import VOCABULARY, WIDTH, FeedForward, Gpt, GptBlock, plan_of
from test.common.warned import recorded_warnings
from xla_fsdp import init_mesh
from xla_fsdp.distributed.mesh import mesh_of

scenarios = Scenarios(__name__)
RANKS = 2


def tensor_mesh() -> Any:
    """Both ranks along one axis, after one of size 1 for FSDP."""
    return init_mesh((1, RANKS), ("shard", "tensor"))


def on_device(tensor: Tensor) -> Tensor:
    import torch_xla

    return tensor.to(torch_xla.device())


def given(*shape: int, seed: int = 5) -> Tensor:
    """The same numbers on every rank, and here."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def worst(found: Any, expected: Any) -> float:
    """The largest error."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found.detach().cpu() - expected.detach()).abs().max())


def own(rank: int, tensor: Tensor, layout: Any) -> Tensor:
    """What a rank has of a tensor in a layout; of a partial one, an uneven summand."""
    from xla_fsdp.tensor_parallel import Partial, Shard

    if isinstance(layout, Shard):
        return tensor.chunk(RANKS, layout.dim)[rank]
    return tensor * (0.25, 0.75)[rank] if isinstance(layout, Partial) else tensor


# ---------------------------------------------------------------- layouts


@scenarios.add
def layouts(rank: int) -> dict[str, tuple[float, float]]:
    """Errors of values and gradients of every change."""
    from xla_fsdp.distributed.mesh_axis import AxisComm
    from xla_fsdp.tensor_parallel import Partial, Replicate, Shard
    from xla_fsdp.tensor_parallel.mappings import redistribute

    axis = AxisComm(tensor_mesh()["tensor"])
    whole, weight = given(4, 6), given(4, 6, seed=6)
    news = (Replicate(), Shard(0), Shard(-1))
    found = {}
    for old in (*news, Partial()):
        for new in news:
            x = on_device(own(rank, whole, old)).requires_grad_()
            y = redistribute(x, old, new, axis, "x")
            (y * on_device(own(rank, weight, new))).sum().backward()
            # The gradient of each summand of a partial tensor is that of the sum.
            expected = weight if isinstance(old, Partial) else own(rank, weight, old)
            found[f"{old} to {new}"] = (worst(y, own(rank, whole, new)), worst(x.grad, expected))
    return found


@scenarios.add
def penalties(rank: int) -> dict[str, float]:
    """Largest errors of gradients of a loss with the gradient of the input in it."""
    return {name: _penalty_error(rank, sequence=name == "sequence") for name in ("", "sequence")}


def _penalty_error(rank: int, *, sequence: bool) -> float:
    from xla_fsdp.distributed.mesh_axis import AxisComm
    from xla_fsdp.distributed.placement import known_placement
    from xla_fsdp.tensor_parallel import Replicate, Shard, parallelize_module
    from xla_fsdp.tensor_parallel.mappings import redistribute

    mesh, between = tensor_mesh()["tensor"], Shard(1) if sequence else Replicate()
    axis, ends = AxisComm(mesh), (Replicate(), between)
    styles = plan_of("Gpt", sequence=sequence).items()
    plan = {name[9:]: style for name, style in styles if name.startswith("blocks.*.")}
    plain, block = make(GptBlock), parallelize_module(make(GptBlock), mesh, plan)
    block = block.to(on_device(torch.empty(0)).device)

    def parallel(x: Tensor) -> Tensor:
        inner = block(redistribute(x, *ends, axis, "x"))
        return redistribute(inner, *reversed(ends), axis, "y")

    expected, x = given(2, 8, WIDTH).requires_grad_(), on_device(given(2, 8, WIDTH))
    _penalty(plain, expected).backward()
    _penalty(parallel, x.requires_grad_()).backward()
    errors = [worst(x.grad, expected.grad)]
    for own_param, param in zip(block.parameters(), plain.parameters(), strict=True):
        placement = known_placement(own_param)
        grad = param.grad if placement is None else placement.slice_of(param.grad, rank)
        errors.append(worst(own_param.grad, grad))
    return max(errors)


def _penalty(block: Any, x: Tensor) -> Tensor:
    output = block(x)
    [grad] = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    return output.mean() + grad.square().mean()


def test_a_gradient_penalty_is_that_of_the_whole_block() -> None:
    for rank in range(RANKS):
        assert max(scenarios.result("penalties", rank).values()) < 1e-5


def test_every_change_of_layout_has_the_values_and_gradients_of_the_whole() -> None:
    found = [scenarios.result("layouts", rank) for rank in range(RANKS)]
    assert len(found[0]) == 12
    assert max(max(errors) for each in found for errors in each.values()) < 1e-6


@scenarios.add
def changed_in_place(rank: int) -> tuple[float, float]:
    """Errors of the gradients of what was gathered, and of what was then added to it in place."""
    from xla_fsdp.distributed.mesh_axis import AxisComm
    from xla_fsdp.tensor_parallel import Partial, Replicate, Shard
    from xla_fsdp.tensor_parallel.mappings import parallel_input, redistribute

    axis = AxisComm(tensor_mesh()["tensor"])
    whole, weight = given(4, 6), given(4, 6, seed=6)
    cut = on_device(own(rank, whole, Shard(1))).requires_grad_()
    shift = on_device(whole).requires_grad_()
    x = redistribute(cut, Shard(1), Replicate(), axis, "x")
    x.mul_(2).add_(shift)
    y = parallel_input(x, Replicate(), axis, "x")
    (y * on_device(own(rank, weight, Partial()))).sum().backward()  # as a cut layer's
    return worst(cut.grad, 2 * own(rank, weight, Shard(1))), worst(shift.grad, weight)


def test_what_is_changed_in_place_after_it_was_gathered_gets_its_gradients() -> None:
    found = [scenarios.result("changed_in_place", rank) for rank in range(RANKS)]
    assert max(max(errors) for errors in found) < 1e-6


# ---------------------------------------------------------------- styles


class Two(nn.Module):
    """Two layers, called with a keyword and giving two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Tensor, str]:
        return self.second(torch.tanh(self.first(x)) * scale), "note"


class Table(nn.Module):
    """An embedding with a row of padding, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(8, 4, padding_idx=2), nn.Linear(4, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids))


def styled(rank: int, module: nn.Module, plan: Any, out_layout: Any, *args: Tensor, **kw: Tensor):
    """Errors of the output, and of the gradients of parameters and inputs, against the plain
    module's."""
    from xla_fsdp.distributed.placement import placement_in
    from xla_fsdp.tensor_parallel import parallelize_module

    def computed(model: Any, place: Any, layout: Any) -> tuple[Tensor, list[Tensor]]:
        inputs = [place(t.clone()).requires_grad_(t.is_floating_point()) for t in args]
        out = model(*inputs, **{name: place(t.clone()) for name, t in kw.items()})
        out = out[0] if isinstance(out, tuple) else out
        weight = given(*(wanted_shape or out.shape), seed=8)
        (out * place(own(rank, weight, layout) if layout else weight)).sum().backward()
        return out, [t.grad for t in inputs if t.grad is not None]

    wanted_shape: Any = None
    plain = copy.deepcopy(module)
    expected, input_grads = computed(plain, lambda t: t, None)
    wanted_shape = tuple(expected.shape)
    parallel = parallelize_module(copy.deepcopy(module), tensor_mesh()["tensor"], plan).to("xla")
    out, grads = computed(parallel, on_device, out_layout)
    errors = {"output": worst(out, own(rank, expected, out_layout))}
    for number, (a, b) in enumerate(zip(grads, input_grads, strict=True)):
        errors[f"input {number}"] = worst(a, b)
    for (name, a), b in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        owner, _, attribute = name.rpartition(".")
        placement = placement_in(parallel.get_submodule(owner), attribute)
        wanted = b.grad if placement is None else placement.slice_of(b.grad, rank)
        errors[name] = worst(a.grad, wanted)
    return errors


@scenarios.add
def style_by_style(rank: int) -> dict[str, dict[str, float]]:
    from xla_fsdp.tensor_parallel import (
        ColwiseParallel,
        Partial,
        PrepareModuleInput,
        PrepareModuleInputOutput,
        PrepareModuleOutput,
        Replicate,
        RowwiseParallel,
        Shard,
    )

    col, row = ColwiseParallel, RowwiseParallel
    x, ids = given(3, 4, 8), torch.tensor([[0, 7, 2], [5, 2, 1]])
    two, table = make(Two), make(Table)
    scale = {"scale": given(8)}
    keyword = PrepareModuleInput(
        input_kwarg_layouts={"scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Shard(-1)},
    )
    between = {"": keyword, "first": col()}
    partial = PrepareModuleOutput(
        output_layouts=(Partial(), None), desired_output_layouts=(Replicate(), None)
    )
    both = PrepareModuleInputOutput(
        input_layouts=(Replicate(),),
        desired_input_layouts=(Shard(1),),
        input_kwarg_layouts={"scale": Replicate()},
        desired_input_kwarg_layouts={"scale": Shard(-1)},
        output_layouts=(Shard(0), None),
        desired_output_layouts=(Replicate(), None),
    )
    around = {
        "": both,
        "first": col(input_layouts=Shard(1)),
        "second": row(output_layouts=Shard(0)),
    }
    pair = {"table": row(input_layouts=Replicate()), "layer": col(output_layouts=Replicate())}
    by_default = {"table": row(), "layer": col(output_layouts=Replicate())}
    wide = {"table": col(output_layouts=Replicate()), "layer": row(input_layouts=Replicate())}
    runs: dict[str, Any] = {
        "features": ({**between, "second": row(output_layouts=Shard(-1))}, Shard(-1)),
        "partial": ({**between, "": keyword, "second": row(output_layouts=Partial())}, Partial()),
        "around": (around, None),
    }
    found = {}
    for name, (plan, layout) in runs.items():
        if name == "partial":  # two styles for one module, one after the other
            found[name] = _summed_by_output(rank, two, plan, partial, x, scale)
            continue
        found[name] = styled(rank, two, plan, layout, x[:2], **scale)
    found["pair"] = styled(rank, table, pair, None, ids)
    found["ids"] = styled(rank, table, by_default, None, ids)
    found["wide"] = styled(rank, table, wide, None, ids)
    return found


def _summed_by_output(
    rank: int, module: nn.Module, plan: Any, after: Any, x: Tensor, keywords: Any
) -> dict[str, float]:
    from xla_fsdp.tensor_parallel import parallelize_module

    mesh = tensor_mesh()["tensor"]
    parallel = parallelize_module(copy.deepcopy(module), mesh, plan)
    parallelize_module(parallel, mesh, after)
    out, note = parallel.to("xla")(on_device(x), scale=on_device(keywords["scale"]))
    assert note == "note"
    return {"output": worst(out, module(x, **keywords)[0])}


def test_styles_compute_what_the_plain_module_does() -> None:
    for rank in range(RANKS):
        for name, errors in scenarios.result("style_by_style", rank).items():
            assert max(errors.values()) < 1e-5, (name, errors)


@scenarios.add
def copies(rank: int) -> dict[str, Any]:
    """Of a module with styles, by copying and pickling; and what it is."""
    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    module = parallelize_module(make(Two), tensor_mesh()["tensor"], plan)
    x, scale = on_device(given(2, 8)), on_device(given(4))
    expected = copy.deepcopy(module).to("xla")(x, scale=scale)[0].cpu()
    others = (copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
    found = [torch.equal(o.to("xla")(x, scale=scale)[0].cpu(), expected) for o in others]
    return {"same": found, "is_linear": isinstance(module.first, nn.Linear)}


def test_modules_are_copied_and_pickled_with_their_styles() -> None:
    assert scenarios.result("copies") == {"same": [True, True], "is_linear": True}


@scenarios.add
def autocast_dtypes(rank: int) -> list[str]:
    """Of the outputs of row-parallel layers with a bias, in several layouts."""
    from xla_fsdp.tensor_parallel import Replicate, RowwiseParallel, Shard, parallelize_module

    found = []
    for layout in (Replicate(), Shard(0), Shard(1)):
        layer, style = make(lambda: nn.Linear(8, 8)), RowwiseParallel(output_layouts=layout)
        layer = parallelize_module(layer, tensor_mesh()["tensor"], style).to("xla")
        with torch.autocast("xla", dtype=torch.bfloat16):
            found.append(str(layer(on_device(given(2, 4))).dtype))
    return found


def test_outputs_under_autocast_have_its_dtype() -> None:
    assert scenarios.result("autocast_dtypes") == ["torch.bfloat16"] * 3


class Dropped(nn.Module):
    """A dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x)


@scenarios.add
def dropped(rank: int) -> Tensor:
    """A mask, and whether the gradient has the same."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp.tensor_parallel import SequenceParallel, parallelize_module

    xm.set_rng_state(7)
    module = parallelize_module(Dropped(), tensor_mesh()["tensor"], {"drop": SequenceParallel()})
    x = on_device(torch.ones(64, 64)).requires_grad_()
    out = module(x)
    out.sum().backward()
    return torch.stack([out.detach().cpu(), x.grad.cpu()])


def test_masks_differ_between_pieces_of_a_sequence() -> None:
    (first, gradient), (second, _) = (scenarios.result("dropped", rank) for rank in range(RANKS))
    assert torch.equal(first, gradient)
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    kept = [(mask != 0).float().mean().item() for mask in (first, second)]
    assert kept == pytest.approx([0.75, 0.75], abs=0.03)
    both = ((first != 0) & (second != 0)).float().mean().item()
    assert both == pytest.approx(0.75**2, abs=0.03)  # as of masks that know nothing of each other


# ---------------------------------------------------------------- loss


LOSSES: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "label_smoothing": 0.2},
    "none": {"reduction": "none", "label_smoothing": 0.1},
    "weighted": {"weight": True, "label_smoothing": 0.3, "ignore_index": 3},
}


@scenarios.add
def losses(rank: int) -> dict[str, tuple[float, float]]:
    """Errors of losses and of gradients, for logits of several shapes."""
    from xla_fsdp.tensor_parallel import loss_parallel

    found = {}
    for shape in ((5, 8), (2, 8, 3), (8,)):
        logits, classes = 3 * given(*shape), 1 if len(shape) > 1 else 0
        rows = [size for dim, size in enumerate(shape) if dim != classes]
        target = torch.randint(0, 8, rows, generator=torch.Generator().manual_seed(1))
        for name, options in LOSSES.items():
            options = {**options, **({"weight": given(8).abs()} if "weight" in options else {})}
            plain = logits.clone().requires_grad_()
            expected = F.cross_entropy(plain, target, **options)
            expected.sum().backward()
            cut = on_device(logits.chunk(RANKS, classes)[rank]).requires_grad_()
            here = {k: on_device(v) if isinstance(v, Tensor) else v for k, v in options.items()}
            with loss_parallel(tensor_mesh()["tensor"]):
                loss = F.cross_entropy(cut, on_device(target), **here)
            loss.sum().backward()
            grad = plain.grad.chunk(RANKS, classes)[rank]
            found[f"{shape} {name}"] = (worst(loss, expected), worst(cut.grad, grad))
    return found


def test_losses_of_cut_logits_are_those_of_the_whole() -> None:
    for rank in range(RANKS):
        found = scenarios.result("losses", rank)
        assert len(found) == 12
        for name, errors in found.items():
            assert max(errors) < 2e-6, (name, errors)


@scenarios.add
def out_of_range(rank: int) -> list[float]:
    """Losses of rows whose targets are no classes, or are ignored."""
    from xla_fsdp.tensor_parallel import loss_parallel

    logits = on_device(given(5, 8).chunk(RANKS, 1)[rank])
    target = on_device(torch.tensor([0, 8, -1, 999, -100]))
    with loss_parallel(tensor_mesh()["tensor"]):
        return F.cross_entropy(logits, target, reduction="none").tolist()


def test_the_loss_of_a_target_out_of_range_is_nan() -> None:
    found = [math.isnan(each) for each in scenarios.result("out_of_range")]
    assert found == [False, True, True, True, False]


@scenarios.add
def other_losses(rank: int) -> dict[str, Any]:
    """What loss_parallel leaves alone, and what it refuses."""
    from xla_fsdp.tensor_parallel import ColwiseParallel, Shard, loss_parallel, parallelize_module

    def unknown() -> None:
        with loss_parallel():
            pass

    before = message(unknown)
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    head = parallelize_module(make(lambda: nn.Linear(4, 8)), tensor_mesh()["tensor"], style)
    logits, target = on_device(given(3, 7)), on_device(torch.tensor([0, 6, 2]))
    with loss_parallel():
        plain = F.cross_entropy(logits, target)
        refused = message(lambda: F.cross_entropy(logits[:, :4], on_device(given(3, 4)).softmax(1)))
        of_slices = [
            message(lambda: F.nll_loss(logits[:, :4], target)),
            message(lambda: logits[:, :4].log_softmax(-1)),
            message(lambda: F.log_softmax(logits[:, :4], dim=1)),
            message(lambda: torch.logsumexp(logits[:, :4], 1)),
        ]
        torch.logsumexp(logits, 1)  # of whole rows
    error = worst(plain, F.cross_entropy(given(3, 7), torch.tensor([0, 6, 2])))
    del head
    found = {"before": before, "error": error, "refused": refused, "after": message(unknown)}
    return {**found, "of slices": of_slices}


def test_loss_parallel_leaves_other_losses_alone() -> None:
    found = scenarios.result("other_losses")
    assert found["error"] < 1e-6
    assert "targets are probabilities" in found["refused"]
    assert all("this rank's 4 classes" in each for each in found["of slices"]), found["of slices"]
    assert "loss_parallel knows no logits" in found["before"]
    assert found["after"] == found["before"]


# ---------------------------------------------------------------- programs


def step_of(rank: int, *, sequence: bool) -> str:
    """The program of a forward and backward of one block."""
    from xla_fsdp.tensor_parallel import parallelize_module
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    plan = plan_of("Gpt", sequence=sequence)
    own_plan = {
        name.removeprefix("blocks.*."): style for name, style in plan.items() if "blocks" in name
    }
    block = parallelize_module(make(GptBlock), tensor_mesh()["tensor"], own_plan).to("xla")
    x = on_device(given(2, 4 if sequence else 8, WIDTH)).requires_grad_()
    execute_pending()
    block(x).square().sum().backward()
    text = lowered_hlo([x.grad, *(param.grad for param in block.parameters())])
    execute_pending()
    return text


@scenarios.add
def programs(rank: int) -> dict[bool, str]:
    return {sequence: step_of(rank, sequence=sequence) for sequence in (False, True)}


def test_a_block_communicates_twice_forward_and_twice_backward() -> None:
    """Query, key and value share one reduction; on CPU ranks an all-reduce is a reduce-scatter and
    an all-gather."""
    for sequence, text in scenarios.result("programs").items():
        found = Program(text).all("all-gather", "reduce-scatter", "all-reduce")
        large = [each for each in found if torch.Size(each.shape).numel() > 4 * WIDTH]
        kinds = Counter(each.op for each in large)
        assert kinds == {"all-gather": 4, "reduce-scatter": 4}, sequence


def test_ranks_run_one_program() -> None:
    first, second = (scenarios.result("programs", rank) for rank in range(RANKS))
    assert first == second


@scenarios.add
def sizes_of_logits(rank: int) -> dict[bool, bool]:
    """Whether anything in the program of a step has as many elements along a dim as there are
    classes, with ``loss_parallel`` and without."""
    from xla_fsdp.tensor_parallel import loss_parallel, parallelize_module
    from xla_fsdp.xla.graph import lowered_hlo
    from xla_fsdp.xla.host import execute_pending

    found = {}
    for cut in (True, False):
        plan = {name: style for name, style in plan_of("Llama", loss=cut).items() if name == "head"}
        head = make(lambda: nn.ModuleDict({"head": nn.Linear(WIDTH, VOCABULARY, bias=False)}))
        parallelize_module(head, tensor_mesh()["tensor"], plan).to("xla")
        x = on_device(given(4, WIDTH)).requires_grad_()
        target = on_device(torch.arange(4))
        execute_pending()
        with loss_parallel(tensor_mesh()["tensor"]) if cut else contextlib.nullcontext():
            F.cross_entropy(head["head"](x), target).backward()
        program = Program(lowered_hlo([x.grad, head["head"].weight.grad]))
        found[cut] = any(VOCABULARY in each.shape for each in program.instructions.values())
        execute_pending()
    return found


def test_loss_parallel_builds_nothing_of_the_size_of_all_classes() -> None:
    assert scenarios.result("sizes_of_logits") == {True: False, False: True}


# ---------------------------------------------------------------- parameters


@scenarios.add
def initialized(rank: int) -> dict[str, bool]:
    """Whether parameters are slices of what the plain model is initialized with."""
    from xla_fsdp import full_state_dict, fully_shard, init_from_checkpoint, one_rank_at_a_time
    from xla_fsdp.distributed.placement import placement_in
    from xla_fsdp.tensor_parallel import parallelize_module

    mesh = tensor_mesh()
    plain = make(FeedForward).state_dict()
    plan = {k.removeprefix("blocks.*.mlp."): s for k, s in plan_of("Llama").items() if "mlp" in k}
    built = parallelize_module(make(FeedForward), mesh["tensor"], plan)
    slices = {
        name: torch.equal(
            module.weight,
            placement_in(module, "weight").slice_of(plain[f"{name}.weight"], rank),
        )
        for name, module in built.named_children()
    }

    def wrapped(*ignored: str) -> Any:
        with one_rank_at_a_time(), torch.random.fork_rng():
            torch.manual_seed(3)
            with torch.device("meta"):
                model = FeedForward()
            parallelize_module(model, mesh["tensor"], plan)
            left = [model.get_parameter(name) for name in ignored]
            return fsdp(model, mesh=mesh["shard"], ignored_params=left)

    def in_place() -> Any:
        with torch.device("meta"):
            model = FeedForward()
        parallelize_module(model, mesh["tensor"], plan)
        fully_shard(model, mesh=mesh["shard"]).to_empty(device="xla")
        for layer in (model.gate, model.up, model.down):
            nn.init.constant_(layer.weight, 0.5)
            layer.weight.data[1, 2] = 7.0
        return model

    def from_file() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(plain, f"{folder}/plain.pth")
            with torch.device("meta"):
                model = FeedForward()
            parallelize_module(model, mesh["tensor"], plan)
            init = init_from_checkpoint(model, f"{folder}/plain.pth")
            return fsdp(model, mesh=mesh["shard"], param_init_fn=init)

    loaded = full_state_dict(from_file())
    slices["file"] = all(torch.equal(loaded[name], value) for name, value in plain.items())
    state = full_state_dict(wrapped())
    slices["meta"] = all(torch.equal(state[name], value) for name, value in plain.items())
    ignored = wrapped("down.weight").down.weight
    down = placement_in(built.down, "weight").slice_of(plain["down.weight"], rank)
    slices["ignored"] = torch.equal(ignored.cpu(), down)  # and no shard, which would be flat
    filled = full_state_dict(in_place())["down.weight"]
    slices["in place"] = (filled == 0.5).sum() == filled.numel() - 1 and filled[1, 2] == 7.0
    return {name: bool(value) for name, value in slices.items()}


def test_a_sharded_initialization_is_that_of_the_plain_model() -> None:
    for rank in range(RANKS):
        found = scenarios.result("initialized", rank)
        names = ("gate", "up", "down", "file", "meta", "ignored", "in place")
        assert found == dict.fromkeys(names, True)


@scenarios.add
def sources(rank: int) -> list[float]:
    """Of whose values the slices are."""
    from xla_fsdp.tensor_parallel import ColwiseParallel, parallelize_module

    def value(source: int | None) -> float:
        layer = make(lambda: nn.Linear(4, 4))
        nn.init.constant_(layer.weight, float(rank))
        mesh = tensor_mesh()["tensor"]
        parallelize_module(layer, mesh, ColwiseParallel(), src_data_rank=source)
        return layer.weight.mean().item()

    return [value(source) for source in (0, 1, None)]


def test_values_are_those_of_the_source_rank() -> None:
    assert [scenarios.result("sources", rank) for rank in range(RANKS)] == [[0, 1, 0], [0, 1, 1]]


@scenarios.add
def views(rank: int) -> dict[str, Any]:
    """What a shard says of itself, and loading of whole tensors."""
    from xla_fsdp import full_state_dict, load_full_state_dict
    from xla_fsdp.tensor_parallel import parallelize_module

    mesh, plain = tensor_mesh(), make(Gpt, seed=9).state_dict()
    model = parallelize_module(make(Gpt), mesh["tensor"], plan_of("Gpt"))
    model = fsdp(model, mesh=mesh["shard"])
    load_full_state_dict(model, plain)
    weight = model.blocks[0].attention.out.weight
    state = full_state_dict(model, rank0_only=True)
    wrong = {**plain, "norm.weight": torch.ones(3), "head.weight": torch.ones(12, WIDTH)}
    return {
        "placements": str(weight.placements),
        "axes": weight.device_mesh.axis_names,
        "full": torch.equal(weight.full_tensor().cpu(), plain["blocks.0.attention.out.weight"]),
        "state": {name: torch.equal(value, plain[name]) for name, value in state.items()},
        "wrong": message(lambda: model.load_state_dict(wrong)),
    }


def test_state_dicts_are_those_of_the_plain_model() -> None:
    found = [scenarios.result("views", rank) for rank in range(RANKS)]
    for each in found:
        assert each["placements"] == "(Shard(dim=0), Shard(dim=1))"
        assert each["axes"] == ("shard", "tensor")
        assert each["full"]
        assert "holds (12, 32), the full parameter of the model has shape (24, 32)" in each["wrong"]
    assert set(found[0]["state"]) == set(make(Gpt).state_dict())
    assert all(found[0]["state"].values())
    assert found[1]["state"] == {}


@scenarios.add
def left_unsharded(rank: int) -> float:
    """The largest error of a state dict after a step that left full parameters in modules."""
    from xla_fsdp import full_state_dict, fully_shard
    from xla_fsdp.tensor_parallel import parallelize_module

    mesh, plain = tensor_mesh(), make(FeedForward)
    plan = {k.removeprefix("blocks.*.mlp."): s for k, s in plan_of("Llama").items() if "mlp" in k}
    model = parallelize_module(copy.deepcopy(plain), mesh["tensor"], plan)
    model = fully_shard(model, mesh=mesh["shard"])
    model.set_reshard_after_backward(False)
    for each, x in ((plain, given(2, WIDTH)), (model, on_device(given(2, WIDTH)))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        each(x).square().sum().backward()
        optimizer.step()
    state = full_state_dict(model)
    return max(worst(state[name], value) for name, value in plain.state_dict().items())


def test_state_dicts_hold_what_the_optimizer_stepped_also_of_unsharded_units() -> None:
    assert [scenarios.result("left_unsharded", rank) < 1e-5 for rank in range(RANKS)] == [True] * 2


@scenarios.add
def ignored_parts(rank: int) -> dict[str, Any]:
    """Of a model whose unit ignores a cut layer: its state dict, and what is refused."""
    from xla_fsdp import full_state_dict, optim_state_dict
    from xla_fsdp.tensor_parallel import parallelize_module

    mesh, plain = tensor_mesh(), make(FeedForward).state_dict()
    plan = {k.removeprefix("blocks.*.mlp."): s for k, s in plan_of("Llama").items() if "mlp" in k}
    model = parallelize_module(make(FeedForward), mesh["tensor"], plan)
    model.down.to("xla")
    model = fsdp(model, mesh=mesh["shard"], ignored_modules=[model.down])
    of_all, of_units = (
        torch.optim.SGD([model.gate.weight, *more]) for more in ([model.down.weight], [])
    )
    with model.summon_full_params(model):
        shown = message(model.get_shard_metadata)
    return {
        "whole": torch.equal(full_state_dict(model)["down.weight"], plain["down.weight"]),
        "files": message(model.get_shard_metadata),
        "shown": shown,
        "optimizer": message(lambda: optim_state_dict(model, of_all)),
        "of_units": message(lambda: optim_state_dict(model, of_units)),
    }


def test_cut_parameters_outside_of_units_are_not_taken_for_whole() -> None:
    found = scenarios.result("ignored_parts")
    assert found["whole"]
    why = "cannot have parameters that tensor parallelism has cut and no FSDP unit shards"
    for name in ("files", "shown", "optimizer"):
        assert why in found[name]
        assert "different parts: down.weight. Shard" in found[name]
    assert found["of_units"] == "nothing was raised"


# ---------------------------------------------------------------- what is refused


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout()
        self.b.weight = self.a.weight


@scenarios.add
def tied_one_by_one(rank: int) -> dict[str, Any]:
    """Layers of one weight, parallelized in two calls, as torch's examples do."""
    from torch.distributed.tensor import Replicate

    from xla_fsdp.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, col = tensor_mesh()["tensor"], ColwiseParallel(output_layouts=Replicate())
    x = torch.linspace(-1, 1, 12).reshape(2, 6)
    plain = make(Tied)
    expected = plain.b(plain.a(x))
    model = parallelize_module(make(Tied), mesh, {"a": col})
    model.to("xla")
    alone = message(lambda: model.b(x.to("xla")))

    model = parallelize_module(make(Tied), mesh, {"a": col})
    wrong = message(lambda: parallelize_module(model.b, mesh, RowwiseParallel()))
    parallelize_module(model.b, mesh, col)
    are_tied = model.b.weight is model.a.weight
    model.to("xla")
    model.b.weight = model.a.weight
    error = (model.b(model.a(x.to("xla"))).cpu() - expected).abs().max().item()

    again = parallelize_module(make(Tied), mesh, {"a": col})
    sharded = fsdp(again.b, mesh=tensor_mesh()["shard"])
    wrapped = message(lambda: sharded(x))
    return {"alone": alone, "wrong": wrong, "tied": are_tied, "error": error, "wrapped": wrapped}


def test_tied_layers_are_parallelized_in_several_calls() -> None:
    found = scenarios.result("tied_one_by_one")
    for case in ("alone", "wrapped"):
        assert found[case].startswith("ValueError"), found
        assert "weight is tied to weight of a Linear that was parallelized" in found[case]
    assert "tied to a parameter that was cut along 0, and is to be cut along 1" in found["wrong"]
    assert found["tied"]
    assert found["error"] < 1e-5


class Scaled(nn.Embedding):
    """An embedding that computes more than a look-up."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


@scenarios.add
def refusals(rank: int) -> dict[str, str]:
    import torch_xla.core.xla_model as xm

    from xla_fsdp import checkpoint_module
    from xla_fsdp.optim import PeriodicModelAverager, ZeroRedundancyOptimizer
    from xla_fsdp.tensor_parallel import (
        ColwiseParallel,
        Partial,
        PrepareModuleInput,
        Replicate,
        RowwiseParallel,
        Shard,
        parallelize_module,
    )

    mesh = tensor_mesh()
    col, row = ColwiseParallel(), RowwiseParallel()

    def plan(module: nn.Module, plan: Any, on: Any = mesh["tensor"], **options: Any) -> str:
        options = {"src_data_rank": None, **options}
        return message(lambda: parallelize_module(module, on, plan, **options))

    def cut(size: int) -> Any:
        layers = make(lambda: nn.Sequential(nn.Embedding(8, size), nn.Linear(size, size)))
        style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        return parallelize_module(layers, mesh["tensor"], {"0": style}, src_data_rank=None)

    def short() -> Any:
        return cut(4).to("xla")(on_device(torch.zeros(1, 3, dtype=torch.long)))

    tied, layer = make(Tied), make(lambda: nn.Linear(4, 4))
    odd = make(lambda: nn.Sequential(nn.Linear(4, 7), nn.Linear(5, 4)))
    whole_ids = {"input_layouts": (Replicate(),), "desired_input_layouts": (Replicate(),)}
    prepared = parallelize_module(
        make(lambda: nn.Embedding(8, 4)), mesh["tensor"], PrepareModuleInput(**whole_ids)
    )
    cut_once = parallelize_module(make(Two), mesh["tensor"], {"first": col, "second": row})
    apart_mesh = mesh_of((1, 0), (1, RANKS), ("shard", "tensor"))  # the other way round
    two_axes = parallelize_module(make(Two), mesh["tensor"], {"first": col})
    two_axes = fsdp(
        parallelize_module(two_axes, apart_mesh["tensor"], {"second": col}), mesh=mesh["shard"]
    )
    shared = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    sharded = fsdp(make(lambda: nn.Linear(4, 4)))
    whole = cut(4).to("xla")
    whole[0].weight.grad = torch.zeros_like(whole[0].weight)
    averager, apart = PeriodicModelAverager(2), PeriodicModelAverager(2, groups=[[0], [1]])
    return {
        "max_norm": plan(make(lambda: nn.Embedding(8, 4, max_norm=1.0)), col),
        "scaled": plan(make(lambda: Scaled(8, 4)), row),
        "prepared": plan(prepared, row),
        "twice": plan(cut_once, {"first": col, "second": row}),
        "patterns": plan(make(Two), {"first": col, "f*": col}),
        "names": plan(shared, {"a": col, "b.0": col}),
        "uneven": plan(odd, {"0": col, "1": row}),
        "layer": plan(tied, {"drop": col, "a": ColwiseParallel(output_layouts=Partial())}),
        "ways": plan(tied, {"a": col, "b": row}),
        "axes": plan(tied, {}, mesh),
        "source": plan(tied, {}, src_data_rank=2),
        "style": plan(tied, {"a": "colwise"}),
        "forward": plan(checkpoint_module(layer), col),
        "fsdp_first": plan(sharded.module, col),
        "over_again": message(lambda: fsdp(cut(4))),
        "sequence": message(short),
        "step": message(lambda: xm.reduce_gradients(torch.optim.SGD(whole.parameters()))),
        "clip": message(lambda: nn.utils.clip_grad_norm_(whole.parameters(), 1.0)),
        "zero": message(lambda: ZeroRedundancyOptimizer(whole.parameters(), torch.optim.SGD)),
        "two_axes": message(two_axes.get_shard_metadata),
        "averager": message(lambda: averager.average_parameters(whole.parameters())),
        "apart": message(lambda: apart.average_parameters(whole.parameters())),
        "pairs": message(lambda: PrepareModuleInput(input_layouts=(Shard(1), None))),
    }


REFUSED = {
    "uneven": [
        "0.weight has shape (7, 4), and the 2 ranks of axis 'tensor' cannot share the 7 of dim 0",
        "1.weight has shape (4, 5), and the 2 ranks of axis 'tensor' cannot share the 5 of dim 1",
        "build the model with 8",
    ],
    "max_norm": ["Embedding: is an nn.Embedding with max_norm, which a rank cannot do"],
    "scaled": ["Scaled: is a Scaled with a forward of its own", "take ColwiseParallel"],
    "prepared": ["has another style already; give it RowwiseParallel first"],
    "twice": [
        "first.weight is parallelized already (along dim 0, over axis 'tensor')",
        "second.bias is parallelized already (whole on every rank, over axis 'tensor')",
    ],
    "patterns": ["first.weight is given a style twice, also as first.weight"],
    "names": ["b.0.weight is given a style twice, also as a.weight"],
    "layer": [
        "drop: is a Dropout; ColwiseParallel cuts nn.Linear and nn.Embedding",
        "a: its output is Shard(dim=-1) and is to be Partial(sum)",
    ],
    "ways": ["one parameter is to be cut in several ways: a.weight along 0, b.weight along 1"],
    "axes": ["the mesh has the axes shard, tensor; give one of them: mesh['tensor']"],
    "source": ["src_data_rank is 2; expected None or a place on axis 'tensor', from 0 to 1"],
    "style": ["TypeError: the plan has a str for 'a'; expected a ParallelStyle"],
    "forward": ["Linear: has a forward of its own (as of checkpoint_module)"],
    "fsdp_first": ["weight is sharded by FSDP already; parallelize modules first"],
    "over_again": ["0.weight is parallelized over axis 'tensor'", "mesh=mesh['shard']"],
    "sequence": ["0: its output has shape (1, 3, 4)", "cannot share the 3 of dim 1 equally"],
    "step": ["xm.reduce_gradients was called with parameters sharded by xla_fsdp"],
    "clip": ["torch.nn.utils.clip_grad_norm_ was given parameters sharded by xla_fsdp"],
    "zero": [
        "a parameter of shape (4, 4) is a part of a tensor-parallel one, of which ranks [0, 1] "
        "hold others; give groups along another axis"
    ],
    "two_axes": ["parallelized over several: 'tensor' [[0, 1]], 'tensor' [[1, 0]]"],
    "averager": [
        "average_parameters: a parameter of shape (4, 4) is a part of a tensor-parallel one, of "
        "which ranks [0, 1] hold others; give groups along another axis"
    ],
    "apart": ["nothing was raised"],
    "pairs": ["input_layouts are given for [0, 1], and desired_input_layouts for []; give 0, 1"],
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(name: str) -> None:
    found = scenarios.result("refusals")[name]
    for text in REFUSED[name]:
        assert text in found, found


@scenarios.add
def unmatched(rank: int) -> list[str]:
    from xla_fsdp.tensor_parallel import ColwiseParallel, parallelize_module

    with recorded_warnings() as texts:
        plan = {"no.*.such": ColwiseParallel(), "a": ColwiseParallel(), "b": ColwiseParallel()}
        parallelize_module(make(Tied), tensor_mesh()["tensor"], plan, src_data_rank=None)
    return [text for text in texts if "plan" in text]


def test_a_name_that_no_module_has_is_told() -> None:
    assert scenarios.result("unmatched") == [
        "the plan's 'no.*.such' names no module of Tied; it was passed over"
    ]
