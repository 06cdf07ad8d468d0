"""What can be done with full tensors once they are planned: to be described, checked, then run.

Words: a *job* is a set of files (or a DCP directory) that is going to be written from shards.
Always true: making, describing and checking one changes nothing; a job that was run has written
everything, or raised and written nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from xla_fsdp.checkpoint.copying import Watched
from xla_fsdp.checkpoint.errors import CheckpointError
from xla_fsdp.checkpoint.full_tensors import FullCheckpoint
from xla_fsdp.checkpoint.outputs import (
    Output,
    SafetensorsOutput,
    WriteOptions,
    find_output_problems,
    write_outputs,
)
from xla_fsdp.checkpoint.tensor_source import TensorSource


class Job(ABC):
    """Something to write."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """About how much."""

    @abstractmethod
    def find_problems(self, *, overwrite: bool) -> list[str]:
        """Why it could not be written, one line each."""

    @abstractmethod
    def describe(self) -> Iterator[str]:
        """What would be written, in lines for people."""

    @abstractmethod
    def write(self, options: WriteOptions) -> None:
        """Write it; ``CheckpointError`` if that fails or something read is damaged."""

    def run(self, options: WriteOptions) -> None:
        """Check and write.

        Raises:
            CheckpointError: with every problem found; nothing has been changed then.
        """
        if problems := self.find_problems(overwrite=options.overwrite):
            raise CheckpointError(problems)
        self.write(options)


@dataclass(frozen=True)
class FilesJob(Job):
    """Files.

    Args:
        outputs: in the order in which they get their names.
        watched: what to hold against fingerprints.
        make_directories: whether directories that are not there are made.
    """

    outputs: Sequence[Output]
    watched: Sequence[Watched] = field(repr=False)
    make_directories: bool

    @property
    def nbytes(self) -> int:
        """See ``Job``."""
        return sum(output.nbytes for output in self.outputs)

    def find_problems(self, *, overwrite: bool) -> list[str]:
        """See ``Job``."""
        return find_output_problems(
            self.outputs, overwrite=overwrite, make_directories=self.make_directories
        )

    def describe(self) -> Iterator[str]:
        """See ``Job``."""
        for output in self.outputs:
            tensors = (
                f", {len(output.tensors)} tensors" if isinstance(output, SafetensorsOutput) else ""
            )
            yield f"would write {output.path} (about {output.nbytes:,} bytes{tensors})"

    def write(self, options: WriteOptions) -> None:
        """See ``Job``."""
        write_outputs(self.outputs, options, self.watched)


@dataclass(frozen=True)
class DcpJob(Job):
    """A directory of torch.distributed.checkpoint."""

    full: FullCheckpoint
    directory: str
    watched: Sequence[Watched] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """See ``Job``."""
        states = self.full.optimizer.states.values() if self.full.optimizer else ()
        values = [*self.full.model.values(), *(each for state in states for each in state.values())]
        return sum(value.spec.nbytes for value in values if isinstance(value, TensorSource))

    def find_problems(self, *, overwrite: bool) -> list[str]:
        """See ``Job``."""
        from xla_fsdp.checkpoint.dcp_export import find_directory_problems

        return find_directory_problems(self.directory, self.nbytes, overwrite=overwrite)

    def describe(self) -> Iterator[str]:
        """See ``Job``."""
        yield f"would write {self.directory} (about {self.nbytes:,} bytes)"

    def write(self, options: WriteOptions) -> None:
        """See ``Job``."""
        from xla_fsdp.checkpoint.dcp_export import export_dcp

        export_dcp(self.full, self.directory, options, self.watched)
