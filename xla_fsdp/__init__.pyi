from .checkpoint import (
    CheckpointError as CheckpointError,
)
from .checkpoint import (
    consolidate_sharded_model_checkpoints as consolidate_sharded_model_checkpoints,
)
from .checkpoint import (
    consolidate_sharded_state_dicts as consolidate_sharded_state_dicts,
)
from .checkpoint.steps.step_directory import latest_step as latest_step
from .compile import CompiledStep as CompiledStep
from .compile import CompileStepError as CompileStepError
from .compile import compile_step as compile_step
from .distributed.collectives import LocalCollectives as LocalCollectives
from .distributed.context_parallel import (
    context_parallel as context_parallel,
)
from .distributed.context_parallel import (
    context_parallel_unshard as context_parallel_unshard,
)
from .distributed.context_parallel import (
    mean_over_context as mean_over_context,
)
from .distributed.launcher import (
    RankError as RankError,
)
from .distributed.launcher import (
    launch as launch,
)
from .distributed.launcher import (
    one_rank_at_a_time as one_rank_at_a_time,
)
from .distributed.mesh import Mesh as Mesh
from .distributed.mesh import init_mesh as init_mesh
from .distributed.preemption import Preemption as Preemption
from .fsdp.engine.module_state import register_fsdp_forward_method as register_fsdp_forward_method
from .fsdp.engine.shard_tensor import distribute_tensor as distribute_tensor
from .fsdp.explain import explain as explain
from .fsdp.fsdp1_options import (
    BackwardPrefetch as BackwardPrefetch,
)
from .fsdp.fsdp1_options import (
    CPUOffload as CPUOffload,
)
from .fsdp.fsdp1_options import (
    MixedPrecision as MixedPrecision,
)
from .fsdp.fsdp1_options import (
    ShardingStrategy as ShardingStrategy,
)
from .fsdp.fsdp_module import FSDPModule as FSDPModule
from .fsdp.fsdp_module import UnshardHandle as UnshardHandle
from .fsdp.fully_shard import (
    CPUOffloadPolicy as CPUOffloadPolicy,
)
from .fsdp.fully_shard import (
    MixedPrecisionPolicy as MixedPrecisionPolicy,
)
from .fsdp.fully_shard import (
    OffloadPolicy as OffloadPolicy,
)
from .fsdp.fully_shard import (
    fully_shard as fully_shard,
)
from .fsdp.init.from_checkpoint import init_from_checkpoint as init_from_checkpoint
from .fsdp.wrapper import XlaFullyShardedDataParallel as XlaFullyShardedDataParallel
from .nn.activation_checkpoint import (
    checkpoint_module as checkpoint_module,
)
from .nn.activation_checkpoint import (
    checkpoint_wrapper as checkpoint_wrapper,
)
from .nn.attention.api import attention as attention
from .nn.chunked import (
    LinearCrossEntropy as LinearCrossEntropy,
)
from .nn.chunked import (
    StreamedEmbedding as StreamedEmbedding,
)
from .nn.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
from .optim.clip_grad import clip_grad_norm_ as clip_grad_norm_
from .optim.grad_scaler import ShardedGradScaler as ShardedGradScaler
from .recipe.apply import (
    Parallelized as Parallelized,
)
from .recipe.apply import (
    parallelize as parallelize,
)
from .recipe.options import Recipe as Recipe
from .scan import (
    BlockScan as BlockScan,
)
from .scan import (
    checkpoint_name as checkpoint_name,
)
from .scan import (
    name_activation as name_activation,
)
from .scan import (
    scan_blocks as scan_blocks,
)
from .state.checkpoint_manager import CheckpointManager as CheckpointManager
from .state.checkpoint_manager import Restored as Restored
from .state.checkpoint_manager import load_checkpoint as load_checkpoint
from .state.dcp_api import (
    StateDictOptions as StateDictOptions,
)
from .state.dcp_api import (
    get_model_state_dict as get_model_state_dict,
)
from .state.dcp_api import (
    get_optimizer_state_dict as get_optimizer_state_dict,
)
from .state.dcp_api import (
    get_state_dict as get_state_dict,
)
from .state.dcp_api import (
    set_model_state_dict as set_model_state_dict,
)
from .state.dcp_api import (
    set_optimizer_state_dict as set_optimizer_state_dict,
)
from .state.dcp_api import (
    set_state_dict as set_state_dict,
)
from .state.fsdp1_state_dict_type import (
    FullOptimStateDictConfig as FullOptimStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    FullStateDictConfig as FullStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    LocalOptimStateDictConfig as LocalOptimStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    LocalStateDictConfig as LocalStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    ShardedOptimStateDictConfig as ShardedOptimStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    ShardedStateDictConfig as ShardedStateDictConfig,
)
from .state.fsdp1_state_dict_type import (
    StateDictSettings as StateDictSettings,
)
from .state.fsdp1_state_dict_type import (
    StateDictType as StateDictType,
)
from .state.model import (
    full_state_dict as full_state_dict,
)
from .state.model import (
    load_full_state_dict as load_full_state_dict,
)
from .state.model import (
    load_sharded_state_dict as load_sharded_state_dict,
)
from .state.optim_api import (
    load_optim_state_dict as load_optim_state_dict,
)
from .state.optim_api import (
    optim_state_dict as optim_state_dict,
)
from .state.train_checkpoint import (
    PendingSave as PendingSave,
)
from .state.train_checkpoint import (
    save_checkpoint as save_checkpoint,
)
