"""Draw steps for ``compile_step`` whose values are in odd places and change between steps.

A case follows from its seed alone: a small sharded model, an optimizer, a *place* that holds a
number which the step reads, how it *uses* that number, and a *turn*: what else the step or its
caller does. A case is run by plain steps with a sync, and by a compiled step that checks every
replay. Both have to be equal to the bit, or the compiled one raises CompileStepError; anything else
is a fault.

The models are tiny and few, so that most cases share their programs.
"""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import dataclasses
import functools
import gc
import operator
import os
import random
import shutil
import tempfile
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from test.common.scenarios import fsdp, make
from xla_fsdp import CompileStepError, ShardedGradScaler, compile_step
from xla_fsdp.xla import host, ops

WIDTH = 4
ROWS = 2
STEPS = 6
VALUES = (2.0, 0.5, 3.0, -1.0, 0.0, 1, True, 1e-3)
GLOBALS: dict[str, Any] = {}
VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=1.0)


class Tiny(nn.Module):
    """Two layers with a function between them, which is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.function: Any = torch.tanh
        self.scale: Any = 1.0
        self.options = {"scale": 1.0}
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.body(x)) + self.mean)


class Trained(NamedTuple):
    """What a step trains."""

    inner: Tiny
    model: Any
    optimizer: Any


def trained(optimizer: str, *, nested: bool = False, seed: int = 3) -> Trained:
    """Return a sharded ``Tiny`` and an optimizer of its parameters."""
    inner = make(Tiny, seed)
    if nested:
        inner.body = fsdp(inner.body)
    model = fsdp(inner)
    return Trained(inner, model, OPTIMIZERS[optimizer](model.parameters()))


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
}


def on_device(*shape: int, value: float = 0.0) -> Tensor:
    """Return a tensor of one value on the device."""
    return torch.full(shape, value).to(ops.device())


def name_of_rank(name: str) -> str:
    """Return a name that this rank alone uses, as ranks share a process."""
    return f"{name}_{ops.rank()}"


# ---------------------------------------------------------------- places


@dataclass
class Place:
    """A place that holds a number.

    Args:
        read: called by the step.
        write: called between steps.
        state: what holds it, if the step is given that.
        is_argument: ``read`` is called by the caller, who passes the value.
        follows: the rule promises that a change is followed, not refused.
    """

    read: Callable[..., Any]
    write: Callable[[Any], Any]
    state: tuple[Any, ...] = ()
    is_argument: bool = False
    follows: bool = False


@dataclasses.dataclass(slots=True)
class Slotted:
    """A value in a slot."""

    scale: Any = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A value that is replaced with what holds it."""

    scale: Any = 1.0


class Descriptor:
    """Keeps the values of its owners in a list."""

    def __init__(self) -> None:
        self.values: list[Any] = [1.0]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self.values[-1]


class Bag:
    """Attributes that ``__getattr__`` finds."""

    def __init__(self) -> None:
        self.data = {"scale": 1.0}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["data"][name]


class Scale(nn.Module):
    """Has a number among its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0


def _closure(on: Trained) -> Place:
    value: Any = 1.0

    def write(new: Any) -> None:
        nonlocal value
        value = new

    return Place(lambda: value, write)


def _attribute(make_holder: Callable[[], Any]) -> Callable[[Trained], Place]:
    def place(on: Trained) -> Place:
        holder = make_holder()
        return Place(lambda: holder.scale, lambda new: setattr(holder, "scale", new))

    return place


def _item(make_holder: Callable[[], Any], key: Any) -> Callable[[Trained], Place]:
    def place(on: Trained) -> Place:
        holder = make_holder()
        return Place(lambda: holder[key], lambda new: operator.setitem(holder, key, new))

    return place


def _numpy(on: Trained) -> Place:
    held = np.ones(2)
    return Place(lambda: float(held[1]), held.fill)


def _array(on: Trained) -> Place:
    held = array.array("d", [1.0])
    return Place(lambda: held[0], lambda new: operator.setitem(held, 0, float(new)))


def _context_variable(on: Trained) -> Place:
    VARIABLE.set(1.0)
    return Place(VARIABLE.get, VARIABLE.set)


def _property(on: Trained) -> Place:
    class Halves:
        half: Any = 0.5
        scale = property(lambda self: 2 * self.half)

    held = Halves()
    return Place(lambda: held.scale, lambda new: setattr(held, "half", new / 2))


def _class_attribute(on: Trained) -> Place:
    class Held:
        scale: Any = 1.0

    instance = Held()
    return Place(lambda: instance.scale, lambda new: setattr(Held, "scale", new))


def _descriptor(on: Trained) -> Place:
    class Held:
        scale = Descriptor()

    found = vars(Held)["scale"]
    instance = Held()
    return Place(lambda: instance.scale, found.values.append)


def _environment(on: Trained) -> Place:
    name = name_of_rank("SCALE_OF_A_RANDOM_STEP")
    os.environ[name] = "1.0"
    return Place(
        lambda: float(os.environ[name]),
        lambda new: operator.setitem(os.environ, name, str(float(new))),
    )


def _global(on: Trained) -> Place:
    name = name_of_rank("scale")
    GLOBALS[name] = 1.0
    return Place(lambda: GLOBALS[name], lambda new: operator.setitem(GLOBALS, name, new))


def _of_a_module(on: Trained) -> Place:
    module = types.ModuleType("settings")
    module.scale = 1.0  # type: ignore[attr-defined]
    return Place(lambda: module.scale, lambda new: setattr(module, "scale", new))


def _default_argument(on: Trained) -> Place:
    def read(scale: Any = 1.0) -> Any:
        return scale

    return Place(read, lambda new: setattr(read, "__defaults__", (new,)))


def _keyword_default(on: Trained) -> Place:
    def read(*, scale: Any = 1.0) -> Any:
        return scale

    return Place(read, lambda new: setattr(read, "__kwdefaults__", {"scale": new}))


def _frozen(on: Trained) -> Place:
    held = [Frozen()]
    return Place(lambda: held[0].scale, lambda new: operator.setitem(held, 0, Frozen(new)))


def _deque(on: Trained) -> Place:
    held: collections.deque[Any] = collections.deque([1.0])
    return Place(lambda: held[0], held.appendleft)


def _bag(on: Trained) -> Place:
    held = Bag()
    return Place(lambda: held.scale, lambda new: held.data.update(scale=new))


def _function(on: Trained) -> Place:
    held: list[Callable[[], Any]] = [lambda: 1.0]
    return Place(lambda: held[-1](), lambda new: held.append(lambda: new))


def _cached(on: Trained) -> Place:
    held = [1.0]
    cached = functools.cache(lambda: held[0])

    def write(new: Any) -> None:
        held[0] = new
        cached.cache_clear()

    return Place(cached, write)


def _partial(on: Trained) -> Place:
    held: dict[str, Any] = {"scale": 1.0}
    return Place(functools.partial(held.get, "scale"), lambda new: held.update(scale=new))


def _host_tensor(on: Trained) -> Place:
    held = torch.ones(())
    return Place(lambda: held.item(), lambda new: held.fill_(float(new)))


def _in_object_of_state(on: Trained) -> Place:
    held = types.SimpleNamespace(scale=1.0, tensor=on_device(2))
    return Place(lambda: held.scale, lambda new: setattr(held, "scale", new), (held,))


def _in_dict_of_state(on: Trained) -> Place:
    held: dict[str, Any] = {"scale": 1.0, "tensor": on_device(2)}
    return Place(lambda: held["scale"], lambda new: held.update(scale=new), (held,))


def _in_model(on: Trained) -> Place:
    return Place(lambda: on.inner.scale, lambda new: setattr(on.inner, "scale", new), follows=True)


def _in_dict_of_model(on: Trained) -> Place:
    return Place(lambda: on.inner.options["scale"], lambda new: on.inner.options.update(scale=new))


def _in_class_of_model(on: Trained) -> Place:
    kind = type("TinyOfACase", (Tiny,), {"factor": 1.0})
    on.inner.__class__ = kind
    return Place(lambda: on.inner.factor, lambda new: setattr(kind, "factor", new))


def _in_module_of_state(on: Trained) -> Place:
    held = Scale()
    return Place(lambda: held.scale, lambda new: setattr(held, "scale", new), (held,), follows=True)


def _module_of_list(on: Trained) -> Place:
    held = [Scale()]

    def write(new: Any) -> None:
        held[0] = Scale()
        held[0].scale = new

    return Place(lambda: held[0].scale, write, (held,))


def _in_group(on: Trained) -> Place:
    [group] = on.optimizer.param_groups
    group["scale"] = 1.0
    return Place(lambda: group["scale"], lambda new: group.update(scale=new))


def _learning_rate(on: Trained) -> Place:
    group = on.optimizer.param_groups[0]
    group["lr"] = 1.0
    return Place(lambda: group["lr"], lambda new: group.update(lr=new))


def _attribute_of_optimizer(on: Trained) -> Place:
    on.optimizer.scale = 1.0
    return Place(lambda: on.optimizer.scale, lambda new: setattr(on.optimizer, "scale", new))


def _buffer(on: Trained) -> Place:
    held = on_device(value=1.0)
    on.inner.register_buffer("factor", held)
    return Place(
        lambda: on.inner.factor,
        lambda new: setattr(on.inner, "factor", on_device(value=new)),
        follows=True,
    )


def _tensor_of_state(on: Trained) -> Place:
    held = types.SimpleNamespace(scale=on_device(value=1.0))
    return Place(
        lambda: held.scale,
        lambda new: setattr(held, "scale", on_device(value=new)),
        (held,),
        follows=True,
    )


def _tensor_of_slot(on: Trained) -> Place:
    held = Slotted(on_device(value=1.0))
    return Place(lambda: held.scale, lambda new: held.scale.fill_(new), (held,), follows=True)


def _tensor_of_tuple(on: Trained) -> Place:
    held = [(on_device(value=1.0), [on_device(2)])]
    return Place(
        lambda: held[0][0],
        lambda new: operator.setitem(held, 0, (on_device(value=new), held[0][1])),
        (held,),
        follows=True,
    )


def _tensor_of_elsewhere(on: Trained) -> Place:
    held = {"scale": on_device(value=1.0)}
    return Place(lambda: held["scale"], lambda new: held.update(scale=on_device(value=new)))


def _argument(on: Trained) -> Place:
    held = [1.0]
    return Place(
        lambda: held[0],
        lambda new: operator.setitem(held, 0, new),
        is_argument=True,
        follows=True,
    )


def _tensor_argument(on: Trained) -> Place:
    held = [1.0]
    return Place(
        lambda: on_device(value=held[0]),
        lambda new: operator.setitem(held, 0, new),
        is_argument=True,
        follows=True,
    )


PLACES: dict[str, Callable[[Trained], Place]] = {
    "closure": _closure,
    "slots": _attribute(Slotted),
    "namespace": _attribute(lambda: types.SimpleNamespace(scale=1.0)),
    "dict": _item(lambda: {"scale": 1.0}, "scale"),
    "list": _item(lambda: [1.0], 0),
    "user dict": _item(lambda: collections.UserDict(scale=1.0), "scale"),
    "numpy": _numpy,
    "array": _array,
    "context variable": _context_variable,
    "property": _property,
    "class attribute": _class_attribute,
    "descriptor": _descriptor,
    "environment": _environment,
    "global": _global,
    "attribute of a Python module": _of_a_module,
    "default argument": _default_argument,
    "default of a keyword": _keyword_default,
    "frozen": _frozen,
    "deque": _deque,
    "__getattr__": _bag,
    "function of a list": _function,
    "cached function": _cached,
    "partial": _partial,
    "host tensor": _host_tensor,
    "object of the state": _in_object_of_state,
    "dict of the state": _in_dict_of_state,
    "attribute of the model": _in_model,
    "dict of the model": _in_dict_of_model,
    "class of the model": _in_class_of_model,
    "module of the state": _in_module_of_state,
    "module replaced in a list": _module_of_list,
    "param group": _in_group,
    "learning rate": _learning_rate,
    "attribute of the optimizer": _attribute_of_optimizer,
    "buffer": _buffer,
    "tensor of the state": _tensor_of_state,
    "tensor in a slot": _tensor_of_slot,
    "tensor in a tuple": _tensor_of_tuple,
    "tensor of elsewhere": _tensor_of_elsewhere,
    "argument": _argument,
    "tensor argument": _tensor_argument,
}


# ---------------------------------------------------------------- how the number is used


def _branch(loss: Tensor, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return torch.where(value > 1, loss.square(), loss)
    return loss.square() if value > 1 else loss


def _made(loss: Tensor, value: Any) -> Tensor:
    return loss * (value if isinstance(value, Tensor) else on_device(value=float(value)))


def _part(loss: Tensor, value: Any) -> Tensor:
    return loss * 2 if isinstance(value, Tensor) or not value else loss / 2


USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "times": operator.mul,
    "plus": lambda loss, value: (loss + value).square(),
    "branch": _branch,
    "tensor made of it": _made,
    "truth": _part,
}


# ---------------------------------------------------------------- turns


class Turn:
    """What else a step, or who calls it, does. This one does nothing.

    Args:
        on: what is trained.
        chance: of the case.
        begin: the number of the step before which something changes.
    """

    follows: ClassVar[bool] = True
    """The rule promises that this is followed, not refused."""
    steps: ClassVar[int] = STEPS + 1
    optimizer: ClassVar[str] = ""
    """The optimizer that it needs, "" for any."""

    def __init__(self, on: Trained, chance: random.Random, begin: int) -> None:
        self.on, self.chance, self.begin = on, chance, begin
        self.state: tuple[Any, ...] = ()
        self.prepare()

    def prepare(self) -> None:
        """Make what the case needs before its first step."""

    def between(self, number: int) -> None:
        """Change something before step ``number``."""

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Return what the step is called with besides its batch."""
        return ()

    def rows(self, number: int) -> int:
        """Return the rows of a batch."""
        return ROWS

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        """Take a step; ``use`` makes the loss depend on the number of the place."""
        self.on.optimizer.zero_grad()
        loss = use(self.loss(x))
        loss.backward()
        self.on.optimizer.step()
        self.after(loss)
        return loss

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss of a batch."""
        return self.on.model(x).square().sum()

    def after(self, loss: Tensor) -> None:
        """Do what follows the optimizer's step."""

    def held(self) -> list[Tensor]:
        """Return tensors that it keeps."""
        return []


class Accumulation(Turn):
    """Every second step updates, which a plain argument says."""

    steps = 8  # two programs, each of which is traced twice

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (number % 2 == 1,)

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        [last] = arguments
        with nullcontext() if last else self.on.model.no_sync():
            loss = use(self.loss(x))
            loss.backward()
        if last:
            self.on.optimizer.step()
            self.on.optimizer.zero_grad()
        return loss


class CountedAccumulation(Accumulation):
    """Every second step updates, which the step counts itself."""

    follows = False

    def prepare(self) -> None:
        self.count = 0

    def arguments(self, number: int) -> tuple[Any, ...]:
        return ()

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        self.count += 1
        return super().step(x, use, self.count % 2 == 0)


class TwoModels(Turn):
    """Two models in turns, which an argument chooses."""

    steps = 8  # two programs, each of which is traced twice

    def prepare(self) -> None:
        self.both = [self.on, trained("sgd", seed=5)]
        self.state = (self.both[1].model, self.both[1].optimizer)

    def arguments(self, number: int) -> tuple[Any, ...]:
        return (number % 2,)

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        self.on = self.both[arguments[0]]
        return super().step(x, use)

    def held(self) -> list[Tensor]:
        return list(self.both[1].model.state_dict().values())


class HeldModel(TwoModels):
    """Another model in an object of the state, from some step on."""

    follows = False

    def prepare(self) -> None:
        super().prepare()
        self.holder = types.SimpleNamespace(on=self.both[0])
        self.state = (self.holder,)

    def between(self, number: int) -> None:
        self.holder.on = self.both[number >= self.begin]

    def arguments(self, number: int) -> tuple[Any, ...]:
        return ()

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        self.on = self.holder.on
        return Turn.step(self, x, use)


class ModelArgument(TwoModels):
    """Two models with their optimizers, as arguments."""

    def prepare(self) -> None:
        super().prepare()
        self.state = ()

    def arguments(self, number: int) -> tuple[Any, ...]:
        on = self.both[number % 2]
        return on.model, on.optimizer

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        model, optimizer = arguments
        optimizer.zero_grad()
        loss = use(model(x).square().sum())
        loss.backward()
        optimizer.step()
        return loss


class ReplacedFunction(Turn):
    """A function among the model's attributes is replaced."""

    def between(self, number: int) -> None:
        if number == self.begin:
            self.on.inner.function = self.chance.choice([torch.relu, torch.sigmoid, _doubled])


class ReplacedCallable(Turn):
    """The same with an object, whose number changes later."""

    follows = False

    def prepare(self) -> None:
        self.function = Called()
        self.on.inner.function = self.function

    def between(self, number: int) -> None:
        if number == self.begin:
            self.function.factor = 2.0


class Called:
    """A function with a number."""

    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


class ReplacedModule(Turn):
    """A module without parameters is replaced by one of another class."""

    def prepare(self) -> None:
        self.on.inner.function = nn.Tanh()

    def between(self, number: int) -> None:
        if number == self.begin:
            self.on.inner.function = self.chance.choice([nn.ReLU, nn.Sigmoid, nn.Tanh])()


class ListOfModules(Turn):
    """Modules in a plain list of the state, which are replaced or get another order."""

    follows = False

    def prepare(self) -> None:
        self.heads: list[Any] = [nn.Tanh(), nn.Sigmoid()]
        self.state = (self.heads,)

    def loss(self, x: Tensor) -> Tensor:
        x = self.on.model(x)
        for head in self.heads:
            x = head(x)
        return x.square().sum()

    def between(self, number: int) -> None:
        if number == self.begin:
            if self.chance.random() < 0.5:
                self.heads.reverse()
            else:
                self.heads[1] = nn.ReLU()


class NewBuffer(Turn):
    """A buffer that each step makes anew."""

    def after(self, loss: Tensor) -> None:
        self.on.inner.mean = self.on.inner.mean * 0.5 + loss.detach() * 1e-3


class BufferBetween(Turn):
    """A buffer is made anew between steps, perhaps in each."""

    def prepare(self) -> None:
        self.each = self.chance.random() < 0.5

    def between(self, number: int) -> None:
        if number >= self.begin if self.each else number == self.begin:
            self.on.inner.mean = on_device(WIDTH, value=0.1 * number)


class Scaled(Turn):
    """Scaled losses, of which one overflows."""

    optimizer = "syncfree"

    def prepare(self) -> None:
        self.scaler = ShardedGradScaler(init_scale=2.0**10, growth_interval=2)
        self.state = (self.scaler,)

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        self.on.optimizer.zero_grad()
        loss = use(self.loss(x))
        self.scaler.scale(loss).backward()
        self.scaler.step(self.on.optimizer)
        self.scaler.update()
        return loss


class Scheduled(Turn):
    """A learning rate that changes before each step."""

    def prepare(self) -> None:
        kinds = (
            functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
            functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6),
            functools.partial(torch.optim.lr_scheduler.LinearLR, total_iters=4),
        )
        self.schedule = self.chance.choice(kinds)(self.on.optimizer)

    def between(self, number: int) -> None:
        if number:
            self.schedule.step()


class Averages(Turn):
    """Averages of the weights, in an object with a dict, changed in place or replaced."""

    def prepare(self) -> None:
        self.inside = self.chance.random() < 0.5
        self.average = types.SimpleNamespace(
            shadow={n: p.detach().clone() for n, p in self.on.model.named_parameters()}
        )
        self.state = (self.average,)

    def after(self, loss: Tensor) -> None:
        with torch.no_grad():
            for name, param in self.on.model.named_parameters():
                old = self.average.shadow[name]
                if self.inside:
                    old.lerp_(param, 0.25)
                else:
                    self.average.shadow[name] = old * 0.75 + param * 0.25

    def between(self, number: int) -> None:
        if number == self.begin:
            self.average.shadow = {n: each * 2 for n, each in self.average.shadow.items()}

    def held(self) -> list[Tensor]:
        return list(self.average.shadow.values())


class ForgottenAverages(Averages):
    """Averages that the step was not told of."""

    follows = False

    def prepare(self) -> None:
        super().prepare()
        self.state = ()


class FrozenParameter(Turn):
    """A parameter is frozen for two steps."""

    def between(self, number: int) -> None:
        param = next(self.on.model.parameters())
        param.requires_grad_(not self.begin <= number < self.begin + 2)


class AddedGroup(Turn):
    """The optimizer gets the last parameter later."""

    def prepare(self) -> None:
        [group] = self.on.optimizer.param_groups
        self.left = group["params"].pop()

    def between(self, number: int) -> None:
        if number == self.begin:
            self.on.optimizer.add_param_group({"params": [self.left], "lr": 1e-3})


class LoadedStates(Turn):
    """State dicts of model or optimizer are loaded."""

    def prepare(self) -> None:
        self.which = self.chance.choice(("both", "model", "optimizer"))

    def between(self, number: int) -> None:
        both = {"model": self.on.model, "optimizer": self.on.optimizer}
        if number == self.begin - 1:
            self.saved = {name: copy.deepcopy(each.state_dict()) for name, each in both.items()}
        if number == self.begin + 1:
            for name, each in both.items():
                if self.which in ("both", name):
                    each.load_state_dict(self.saved[name])


class LoadedCheckpoint(Turn):
    """A checkpoint is saved and loaded."""

    def between(self, number: int) -> None:
        from xla_fsdp import load_checkpoint, save_checkpoint

        if number == self.begin - 1:
            self.folder = host.exchange(tempfile.mkdtemp().encode())[0].decode()
            save_checkpoint(self.folder, self.on.model, self.on.optimizer, step=number)
        if number == self.begin + 1:
            load_checkpoint(self.folder, self.on.model, self.on.optimizer)
            host.exchange(b"")
            shutil.rmtree(self.folder, ignore_errors=True)


class Hooked(Turn):
    """A hook of a module or of a parameter comes and goes."""

    def prepare(self) -> None:
        self.of_param = self.chance.random() < 0.5

    def between(self, number: int) -> None:
        if number == self.begin and self.of_param:
            param = next(self.on.model.parameters())
            self.handle: Any = param.register_hook(lambda grad: grad * 0.5)
        elif number == self.begin:
            self.handle = self.on.inner.head.register_forward_hook(lambda m, i, out: out * 0.5)
        if number == self.begin + 2:
            self.handle.remove()


class Evaluation(Turn):
    """Evaluation for two steps, by the mode of the model."""

    def between(self, number: int) -> None:
        self.on.model.train(not self.begin <= number < self.begin + 2)

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        if self.on.model.training:
            return super().step(x, use)
        with torch.no_grad():
            return use(self.loss(x))


class Dropped(Turn):
    """Dropout, whose rate changes, or with a seed that is set."""

    def prepare(self) -> None:
        self.on.inner.function = nn.Dropout(0.25)
        self.seeds = self.chance.random() < 0.5

    def between(self, number: int) -> None:
        import torch_xla

        if number == self.begin and self.seeds:
            torch_xla.manual_seed(number)
        elif number == self.begin:
            self.on.inner.function.p = 0.5


class ChangedWeights(Turn):
    """Weights are changed in place between steps."""

    def between(self, number: int) -> None:
        if number == self.begin:
            for param in self.on.model.parameters():
                param.data.mul_(0.5)


class ClearedState(Turn):
    """The optimizer forgets its state."""

    def between(self, number: int) -> None:
        if number == self.begin:
            self.on.optimizer.state.clear()


class ReplacedOptimizer(Turn):
    """An object of the state gets another optimizer."""

    follows = False

    def prepare(self) -> None:
        self.holder = types.SimpleNamespace(optimizer=self.on.optimizer)
        self.state = (self.holder,)

    def between(self, number: int) -> None:
        if number == self.begin:
            self.holder.optimizer = OPTIMIZERS["sgd"](self.on.model.parameters())

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        self.holder.optimizer.zero_grad()
        loss = use(self.loss(x))
        loss.backward()
        self.holder.optimizer.step()
        return loss


class ChangedOption(Turn):
    """An option of the optimizer changes: a number or a truth."""

    def prepare(self) -> None:
        self.option, self.value = self.chance.choice(
            (("weight_decay", 0.1), ("maximize", True), ("lr", 0.0), ("lr", 0.5))
        )

    def between(self, number: int) -> None:
        if number == self.begin:
            self.on.optimizer.param_groups[0][self.option] = self.value


class OptionInStep(Turn):
    """The step itself sets the learning rate, from a number outside."""

    follows = False

    def prepare(self) -> None:
        self.rate = 0.1

    def between(self, number: int) -> None:
        if number == self.begin:
            self.rate = 0.5

    def after(self, loss: Tensor) -> None:
        self.on.optimizer.param_groups[0]["lr"] = self.rate


class NewShape(Turn):
    """Batches with more rows."""

    def rows(self, number: int) -> int:
        return ROWS + (number >= self.begin)


class ChangedGradients(Turn):
    """Gradients that stay after a step are changed, or dropped, before the next adds to them."""

    def prepare(self) -> None:
        self.drops = self.chance.random() < 0.5

    def step(self, x: Tensor, use: Callable[[Tensor], Tensor], *arguments: Any) -> Tensor:
        loss = use(self.loss(x))
        loss.backward()
        self.on.optimizer.step()
        return loss

    def between(self, number: int) -> None:
        if number == self.begin:
            for param in self.on.model.parameters():
                if self.drops:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.mul_(0.5)


class TensorChanges(Turn):
    """A tensor of a dict in the state gets another shape, or is gone and made anew by the step."""

    def prepare(self) -> None:
        self.kept: dict[str, Tensor] = {"last": on_device(1)}
        self.state = (self.kept,)
        self.goes = self.chance.random() < 0.5

    def between(self, number: int) -> None:
        if number == self.begin and self.goes:
            del self.kept["last"]
        elif number == self.begin:
            self.kept["last"] = on_device(2)

    def after(self, loss: Tensor) -> None:
        old = self.kept.get("last")
        self.kept["last"] = loss.detach() + (0 if old is None else old)

    def held(self) -> list[Tensor]:
        return list(self.kept.values())


class DrawnOnHost(Turn):
    """Numbers that the host draws."""

    follows = False

    def prepare(self) -> None:
        self.generator = random.Random(3)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x) * self.generator.choice((1.0, 2.0))


class Iterated(Turn):
    """Batches that the step takes from an iterator itself."""

    follows = False

    def prepare(self) -> None:
        self.batches: Iterator[Tensor] = (on_device(ROWS, WIDTH, value=n) for n in range(99))

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x + next(self.batches))


class ReadLoss(Turn):
    """The step reads the loss."""

    follows = False

    def after(self, loss: Tensor) -> None:
        self.last = loss.item()


def _doubled(x: Tensor) -> Tensor:
    return x * 2


def _syncfree(params: Any) -> Any:
    from torch_xla.amp import syncfree

    return syncfree.SGD(params, lr=0.1, momentum=0.9)


OPTIMIZERS["syncfree"] = _syncfree
TURNS: tuple[type[Turn], ...] = (
    Accumulation,
    CountedAccumulation,
    TwoModels,
    HeldModel,
    ModelArgument,
    ReplacedFunction,
    ReplacedCallable,
    ReplacedModule,
    ListOfModules,
    NewBuffer,
    BufferBetween,
    Scaled,
    Scheduled,
    Averages,
    ForgottenAverages,
    FrozenParameter,
    AddedGroup,
    LoadedStates,
    LoadedCheckpoint,
    Hooked,
    Evaluation,
    Dropped,
    ChangedWeights,
    ClearedState,
    ReplacedOptimizer,
    ChangedOption,
    OptionInStep,
    NewShape,
    ChangedGradients,
    TensorChanges,
    DrawnOnHost,
    Iterated,
    ReadLoss,
)


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Case:
    """What is drawn.

    Args:
        changes: what is written into the place before which step.
        begin: before which step the turn changes something.
    """

    seed: int
    optimizer: str
    nested: bool
    place: str
    use: str
    turn: type[Turn]
    changes: dict[int, Any]
    begin: int
    steps: int

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.turn.__name__} from step {self.begin}, {self.optimizer}"
            f"{', nested' if self.nested else ''}; {self.use} {self.place}, {self.changes}"
        )


def drawn(seed: int) -> Case:
    """Draw a case: two of three have a place of a random use, the others a turn, few both."""
    chance = random.Random(seed)
    kind = chance.choice(("place", "place", "turn", "turn", "turn", "both"))
    turn = Turn if kind == "place" else chance.choice(TURNS)
    place = "argument" if kind == "turn" else chance.choice([*PLACES])
    use = chance.choice([*USES]) if kind == "place" else "times"
    steps = STEPS if kind == "place" else turn.steps
    begin = chance.randrange(2, steps - 2)
    first, second = chance.sample(VALUES, 2)
    written = {begin: first}
    changes = chance.choice(
        (written, written, {**written, begin + 1: second}, {begin: 1.0, 0: first}, {})
    )
    changes = {} if kind == "turn" else changes
    # Adam's operations are many, which cost most of the time of a case.
    optimizer = turn.optimizer or ("adamw" if kind == "turn" and chance.random() < 0.25 else "sgd")
    nested = kind == "turn" and chance.random() < 0.25
    return Case(seed, optimizer, nested, place, use, turn, changes, begin, steps)


@dataclass
class Outcome:
    """What a run gives: losses and values as text, which is exact."""

    losses: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    replays: int = 0
    follows: bool = False


def run(case: Case, *, compiled: bool) -> Outcome:
    """Run a case; a compiled step may raise CompileStepError."""
    import torch_xla

    torch_xla.manual_seed(17)
    chance = random.Random(case.seed)
    on = trained(case.optimizer, nested=case.nested)
    place = PLACES[case.place](on)
    turn = case.turn(on, chance, case.begin)
    use, is_argument, read = USES[case.use], place.is_argument, place.read

    def step(x: Tensor, value: Any, *arguments: Any) -> Tensor:
        return turn.step(x, lambda loss: use(loss, value if is_argument else read()), *arguments)

    state = [on.model, on.optimizer, *place.state, *turn.state]
    taken: Any = compile_step(step, state=state, check=1) if compiled else step
    torch_xla.sync()
    found = Outcome(follows=place.follows and turn.follows)
    for number in range(case.steps):
        if number in case.changes:
            place.write(case.changes[number])
        turn.between(number)
        rows = turn.rows(number)
        x = (torch.arange(rows * WIDTH).reshape(rows, WIDTH) * 0.05 + 0.1 * number).to(ops.device())
        loss = taken(x, read() if is_argument else None, *turn.arguments(number))
        if not compiled:
            torch_xla.sync()
        found.losses.append(repr(loss.detach().cpu().tolist()))
    tensors = [*on.model.state_dict().values(), *turn.held()]
    for state_of in on.optimizer.state.values():
        tensors += [each for each in state_of.values() if isinstance(each, Tensor)]
    found.values = [repr(each.detach().cpu().tolist()) for each in tensors]
    found.replays = taken.replays if compiled else 0
    return found


def verdict(seed: int) -> tuple[str, str, int]:
    """Return the verdict, the case with what was found, and the number of replays.

    It is "equal", "refused", "needless" (refused, though the rule promises that it is followed), or
    "fault".
    """
    case = drawn(seed)
    try:
        plain = run(case, compiled=False)
    except Exception as error:  # a fault of the generator
        return "fault", f"{case}: plain: {_text(error)}", 0
    try:
        compiled = run(case, compiled=True)
    except CompileStepError as error:
        kind = "needless" if plain.follows else "refused"
        return kind, f"{case}: {error}", 0
    except Exception as error:  # any other class is what the test looks for
        return "fault", f"{case}: {_text(error)}", 0
    pairs = zip(plain.losses, compiled.losses, strict=True)
    problems = [f"loss {n}: {a}, {b} compiled" for n, (a, b) in enumerate(pairs) if a != b]
    if plain.values != compiled.values:
        pairs = zip(plain.values, compiled.values, strict=False)
        differing = [f"value {n}: {a}, {b}" for n, (a, b) in enumerate(pairs) if a != b]
        problems.append("; ".join(differing) or "another number of values")
    if problems:
        return "fault", f"{case}: silent: {problems[0]}", compiled.replays
    return "equal", str(case), compiled.replays


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)[-6:])


def is_simplified(seed: int) -> bool:
    """Return whether XLA's compiler crashes on this case if it may not simplify algebra."""
    return drawn(seed).optimizer == "syncfree"


def verdicts(rank: int, seeds: list[int]) -> dict[str, Any]:
    """Judge the cases of these seeds; return counts, faults and replays."""
    import warnings

    counts: Counter[str] = Counter()
    faults: list[str] = []
    needless: list[str] = []
    kinds: Counter[str] = Counter()
    replays = 0
    for seed in seeds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, text, replayed = verdict(seed)
        counts[found] += 1
        replays += replayed
        case = drawn(seed)
        kinds[f"{found}: {case.place if case.turn is Turn else case.turn.__name__}"] += 1
        if found == "fault":
            faults.append(text)
        if found == "needless":
            needless.append(text)
        if seed % 16 == 0:
            gc.collect()
    return {
        "counts": dict(counts),
        "kinds": dict(kinds),
        "faults": faults,
        "needless": needless,
        "replays": replays,
    }
