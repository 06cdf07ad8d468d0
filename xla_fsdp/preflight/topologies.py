"""TPU topologies by name: their ranks, the ranks' coordinates on the torus, figures of a chip.

A topology is a generation and the chips along each torus axis, ``v5e:4x4``, or several such slices,
``v5e:4x4*2``, joined by the data-center network. Cloud TPU's names, ``v5litepod-16``, which count
chips, or on v2, v3, v4 and v5p cores, are taken where one shape has so many. A rank is a chip, or
on v2 and v3 one of a chip's two cores.

Invariants: as in torch_xla, rank r is the device with the r-th id; ids count the cores of a chip
first, then x, y and z, then slices.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass

MIB, GIB, GB = 2**20, 2**30, 10**9


@dataclass(frozen=True)
class Chip:
    """One generation of TPU, per rank; speeds are the vendor's published peaks."""

    hbm_bytes: int  # as the compiler counts it
    # Reserved by the runtime, to the MiB; the compiler's out-of-memory errors state it
    # (``test_capacity_tpu`` provokes one).
    reserved_bytes: int
    peak_flops: float  # per second, in bf16
    clock_hz: float  # of the compute core
    link_bytes: float  # per second, of one torus link in one direction
    # Bytes of the host's memory for each rank, by Cloud TPU's tables of machine types.
    host_capacity: int
    network_bytes: float = 3.125 * GB  # per second and chip, between slices
    # Per second and chip, to and from the host's memory, each way: v4's, which is published (Austin
    # et al., How to Scale Your Model, 2025, "How to Think About TPUs").
    host_link_bytes: float = 16 * GB
    cores: int = 1  # ranks per chip
    num_axes: int = 2  # torus axes of a slice
    hosts: tuple[int, ...] = (2, 2)  # chips of one host along each axis; slices are whole hosts
    config: str = ""  # name of the chip configuration for the compiler, if it needs one
    accelerator: str = ""  # an accelerator type of this generation, for the compiler's environment
    init_args: tuple[str, ...] = ()  # flags that torch_xla sets on this generation only

    @property
    def usable_bytes(self) -> int:
        """Device memory for programs and their data."""
        return self.hbm_bytes - self.reserved_bytes


_ASYNC = ("--xla_enable_async_all_gather=true", "--xla_enable_async_collective_permute=true")

_ALWAYS = (
    "--xla_tpu_use_enhanced_launch_barrier=false",
    "--xla_latency_hiding_scheduler_rerun=1",
    "--xla_tpu_prefer_async_allgather_to_allreduce=true",
    "--xla_tpu_enable_flash_attention=false",
)

CHIPS = {
    "v2": Chip(8 * GIB, 531 * MIB, 22.5e12, 0.70e9, 62 * GB, host_capacity=41 * GB,
               cores=2, accelerator="v2-8"),
    "v3": Chip(16 * GIB, 531 * MIB, 61.5e12, 0.94e9, 82 * GB, host_capacity=41 * GB,
               cores=2, accelerator="v3-8"),
    "v4": Chip(32 * GIB, 1284 * MIB, 275e12, 1.05e9, 50 * GB, host_capacity=100 * GB,
               num_axes=3, hosts=(2, 2, 1), config="megacore", accelerator="v4-8"),
    "v5e": Chip(16 * GIB, 259 * MIB, 197e12, 1.5e9, 50 * GB, host_capacity=48 * GB,
                accelerator="v5litepod-8", init_args=_ASYNC),
    "v5p": Chip(96 * GIB, 264 * MIB, 459e12, 1.75e9, 100 * GB, host_capacity=112 * GB,
                network_bytes=6.25 * GB, num_axes=3, hosts=(2, 2, 1), accelerator="v5p-8",
                init_args=_ASYNC),
    "v6e": Chip(32 * GIB - 512 * MIB, 261 * MIB, 918e12, 1.75e9, 112 * GB,
                host_capacity=180 * GB, network_bytes=12.5 * GB, accelerator="v6e-8"),
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """Slices of one generation."""

    name: str  # as given to ``find_topology``
    chip: Chip
    shape: tuple[int, ...]  # chips along x, y (and z) of a slice
    slices: int = 1

    @property
    def slice_name(self) -> str:
        """Name of one of the slices."""
        return self.name.partition("*")[0]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return math.prod(self.shape) * self.chip.cores * self.slices

    @property
    def coords(self) -> list[tuple[int, ...]]:
        """Coordinates of every rank, [core, x, y, z, slice], in rank order."""
        padded = (*self.shape, *(1,) * (3 - len(self.shape)))
        axes = [range(size) for size in (self.slices, *reversed(padded))]
        return [
            (core, x, y, z, number)
            for number, z, y, x in itertools.product(*axes)
            for core in range(self.chip.cores)
        ]

    @property
    def init_args(self) -> str:
        """``LIBTPU_INIT_ARGS`` as torch_xla sets it on this generation."""
        return " ".join((*_ALWAYS, *self.chip.init_args))


def find_topology(name: str) -> Topology:
    """Return the topology called ``name``, such as ``v5e:4x4``, or ``v5e:4x4*2`` for two slices; of
    Cloud TPU's name of a slice, such as ``v5litepod-16``, the one of that size.

    Raises:
        ValueError: if the generation is not known, the shape is no product of sizes, has the wrong
            number of axes or does not consist of whole hosts, or slices are not counted.
        TypeError: for anything but a name.
    """
    if not isinstance(name, str):
        raise TypeError(f"topology is {name!r}; give a name such as 'v5e:4x4'")
    name = _of_cloud(name) or name
    generation, _, rest = name.partition(":")
    layout, star, count = rest.partition("*")
    chip, shape, slices = CHIPS.get(generation), _sizes(layout), _sizes(count) if star else (1,)
    if chip is None or len(slices) != 1 or any(map(operator.mod, shape, chip.hosts)):
        raise ValueError(f"{name!r} is no TPU topology; give one of {known_names()}")
    if len(shape) != chip.num_axes:
        raise ValueError(
            f"{name!r}: chips of {generation} lie along {chip.num_axes} axes; give a shape such as "
            f"{example(generation)}"
        )
    return Topology(name, chip, shape, *slices)


_CLOUD_NAME = re.compile(r"(v[0-9]+[a-z]*)-([0-9]+)(\*[0-9]+)?", re.ASCII)
_CLOUD_GENERATIONS = {"v5litepod": "v5e", "v5lite": "v5e"}
_COUNTED_IN_CORES = ("v2", "v3", "v4", "v5p")
_CUBE = 4
"""Chips along each side of the cubes that larger slices of three axes consist of."""


def _of_cloud(name: str) -> str:
    """Return the name of the topology that Cloud TPU calls ``name``; "" if there is none.

    Raises:
        ValueError: if more than one shape has so many chips.
    """
    match = _CLOUD_NAME.fullmatch(name)
    if match is None:
        return ""
    generation = _CLOUD_GENERATIONS.get(match[1], match[1])
    if generation not in CHIPS:
        return ""
    chips = int(match[2]) / (2 if generation in _COUNTED_IN_CORES else 1)
    shapes = [shape for shape in _shapes(CHIPS[generation]) if math.prod(shape) == chips]
    names = [f"{generation}:{'x'.join(map(str, shape))}{match[3] or ''}" for shape in shapes]
    if len(names) > 1:
        raise ValueError(f"{name!r} has several shapes; give one of {', '.join(names)}")
    return "".join(names)


def _shapes(chip: Chip) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of slices that Cloud TPU has: nearly squares, or of cubes."""
    sizes = [2**power for power in range(10)]
    for shape in itertools.combinations_with_replacement(sizes, chip.num_axes):
        if chip.num_axes == 2:
            if shape[0] >= 2 and shape[1] <= 2 * shape[0]:
                yield shape
        elif all(size % _CUBE == 0 for size in shape):
            yield shape
    if chip.num_axes > 2:
        yield from ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def known_names() -> str:
    """Return the forms of the names that ``find_topology`` takes, as text for messages."""
    forms = {2: "AxB", 3: "AxBxC"}
    names = ", ".join(
        f"{name}:{forms[chip.num_axes]} (such as {example(name)})" for name, chip in CHIPS.items()
    )
    return (
        f"{names}, of whole hosts (2x2 or 2x2x1 chips); with *N for N slices; or Cloud TPU's names "
        f"(such as v5litepod-16)"
    )


def example(generation: str) -> str:
    """Return a topology of this generation."""
    return f"{generation}:4x4" if CHIPS[generation].num_axes == 2 else f"{generation}:2x2x2"


def _sizes(layout: str) -> tuple[int, ...]:
    """Return the sizes in a text such as "4x4"; () if it is malformed."""
    sizes = layout.split("x")
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        return ()
    return tuple(map(int, sizes))
