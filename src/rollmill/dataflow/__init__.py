"""Represents algorithms as data: fragments, edges, graphs of fragments, and the loops that drive a graph."""

from rollmill.dataflow.collecting import (
    COLLECT as COLLECT,
    LEARN as LEARN,
    collect as collect,
    collection_metrics as collection_metrics,
    iteration_key as iteration_key,
    rollout_one as rollout_one,
    start_collector as start_collector,
    start_one as start_one,
    step_all as step_all,
    step_one as step_one,
)
from rollmill.dataflow.crossing import (
    DividedProgram as DividedProgram,
    Handlers as Handlers,
    Piece as Piece,
    answer_crossings as answer_crossings,
    cross as cross,
    divide_at_crossings as divide_at_crossings,
    evaluate as evaluate,
    walk as walk,
    walk_leaves as walk_leaves,
)
from rollmill.dataflow.experience import (
    FILL as FILL,
    empty_experience as empty_experience,
    first_learning_iteration as first_learning_iteration,
    waiting_iterations as waiting_iterations,
)
from rollmill.dataflow.fingerprint import (
    expect_digests as expect_digests,
    fingerprint as fingerprint,
    fragment_fingerprints as fragment_fingerprints,
    iteration_digest as iteration_digest,
    metric_names as metric_names,
    start_digest as start_digest,
    trace_digests as trace_digests,
    without_addresses as without_addresses,
)
from rollmill.dataflow.flow import Flow as Flow, StepReply as StepReply, StepRequest as StepRequest, flow as flow
from rollmill.dataflow.gradients import (
    ElementwiseUpdate as ElementwiseUpdate,
    LossOfOne as LossOfOne,
    MeanGradients as MeanGradients,
    SequenceGradients as SequenceGradients,
    UnfusedPolicy as UnfusedPolicy,
    UnrolledSteps as UnrolledSteps,
)
from rollmill.dataflow.graph import (
    ActionMask as ActionMask,
    Batch as Batch,
    Collector as Collector,
    Decision as Decision,
    ExperienceStore as ExperienceStore,
    Graph as Graph,
    Hyperparameters as Hyperparameters,
    Learner as Learner,
    Loops as Loops,
    Metrics as Metrics,
    PolicyFunction as PolicyFunction,
    PolicyOutputs as PolicyOutputs,
    Reduce as Reduce,
    Sample as Sample,
    State as State,
    Step as Step,
    Trajectory as Trajectory,
    Weights as Weights,
)
from rollmill.dataflow.graph_checks import (
    check_loops as check_loops,
    check_outputs as check_outputs,
    check_parameters as check_parameters,
)
from rollmill.dataflow.graph_traces import TracedDigests as TracedDigests, get_traces as get_traces
from rollmill.dataflow.interfaces import (
    EDGES as EDGES,
    Edge as Edge,
    Interface as Interface,
    add_leading_axis as add_leading_axis,
    interfaces as interfaces,
    tree_bytes as tree_bytes,
)
from rollmill.dataflow.learning import (
    end_iteration as end_iteration,
    learn as learn,
    learn_from_trajectory as learn_from_trajectory,
    learn_sample as learn_sample,
    mean_over_epochs as mean_over_epochs,
    metrics_without_updates as metrics_without_updates,
    prepare as prepare,
    report as report,
    restore_schedules as restore_schedules,
)
from rollmill.dataflow.loops import (
    PackedMetrics as PackedMetrics,
    init_state as init_state,
    iterate as iterate,
    pack_metrics as pack_metrics,
    start_learner as start_learner,
    with_hyperparameters as with_hyperparameters,
)
from rollmill.dataflow.minibatch_loop import (
    COMPUTED as COMPUTED,
    MakeMinibatchLoop as MakeMinibatchLoop,
    MinibatchLoop as MinibatchLoop,
    adapt_hyperparameters as adapt_hyperparameters,
    all_finite as all_finite,
    evaluate_schedules as evaluate_schedules,
    gradient_metrics as gradient_metrics,
    identity as identity,
    is_flag as is_flag,
    learn_minibatch as learn_minibatch,
    plain_minibatch_loop as plain_minibatch_loop,
    row_gradients as row_gradients,
)
from rollmill.dataflow.minibatches import (
    choose_num_shards as choose_num_shards,
    epoch_rows as epoch_rows,
    flat_samples as flat_samples,
    minibatch_gather as minibatch_gather,
    num_shards_for as num_shards_for,
    permutation as permutation,
    shuffled_rows as shuffled_rows,
)
from rollmill.dataflow.packing import (
    TOGETHER as TOGETHER,
    PackedSamples as PackedSamples,
    is_large as is_large,
    pack as pack,
)
from rollmill.dataflow.partition import (
    FRAGMENTS as FRAGMENTS,
    Group as Group,
    Partition as Partition,
    check_partition as check_partition,
    peers as peers,
    replica_environments as replica_environments,
)
from rollmill.dataflow.remote import (
    ENVIRONMENT as ENVIRONMENT,
    REDUCE as REDUCE,
    START as START,
    UPDATE as UPDATE,
    RemoteEnvironment as RemoteEnvironment,
    ResetReply as ResetReply,
    answer_request as answer_request,
    remote_environment as remote_environment,
    remote_reduce as remote_reduce,
    with_remote_environment as with_remote_environment,
    with_remote_update as with_remote_update,
)
from rollmill.dataflow.replay import (
    MAX_ROWS as MAX_ROWS,
    PrioritisedReplay as PrioritisedReplay,
    Replay as Replay,
    ReplayRing as ReplayRing,
    Transitions as Transitions,
)
from rollmill.dataflow.roles import (
    Channel as Channel,
    OwnedPart as OwnedPart,
    Role as Role,
    Stage as Stage,
    graph_roles as graph_roles,
    partition_channels as partition_channels,
    roles as roles,
)
from rollmill.dataflow.sequences import (
    PrioritisedSequences as PrioritisedSequences,
    Sequence as Sequence,
    SequenceReplay as SequenceReplay,
)
