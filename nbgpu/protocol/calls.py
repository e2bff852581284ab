"""The functions of the engine and of the recipes that the notebook calls on ranks.

The notebook refers to them by strings, because it does not import the engine, the recipes or torch. All
strings are in this module, so that a test (tests/unit/protocol/test_calls.py) detects functions that were
moved or renamed.
"""

from __future__ import annotations

from enum import StrEnum


class Call(StrEnum):
    """A function on a rank, as 'module:function'."""

    JOIN = "nbgpu.engine.process.boot:join"
    JOIN_AGAIN = "nbgpu.engine.process.boot:join_again"
    BECOME_RANK_FOR_REPLAY = "nbgpu.engine.process.boot:become_rank_for_replay"
    LAST_CELL_FAILED = "nbgpu.engine.ipykernel.remains:last_cell_failed"
    UNTOUCHED_BY_CELL = "nbgpu.engine.group.group:untouched_by_cell"
    FREE_MEMORY = "nbgpu.engine.memory.usage:free"
    MEASURE_LINKS = "nbgpu.engine.scaling.link_timing:measure"
    TIME_STEP = "nbgpu.engine.measurements:time_step"
    TIME_CELL = "nbgpu.engine.scaling.cell_timeline:measure_step"
    TAKE_CELL_TIMELINE = "nbgpu.engine.scaling.cell_timeline:take"
    COMPARE_CLOCKS = "nbgpu.engine.group.exchange:clock_offsets"
    MODEL_NCCL = "nbgpu.engine.scaling.link_timing:nccl_seconds"
    MEASURE_MEMORY = "nbgpu.engine.measurements:measure_memory"
    PREDICT_MEMORY = "nbgpu.engine.measurements:predict_memory"
    MONOTONIC_S = "time:monotonic"
    """Called to test whether a rank answers, and to read its clock."""

    GET_READY_TO_TRAIN = "nbgpu.engine.train:get_ready"
    TRAIN = "nbgpu.engine.train:run_in_engine"
    SET_DOWN_RUN = "nbgpu.engine.train:set_down"
    LET_GO_OF_RUN = "nbgpu.engine.train:let_go"
    ESTIMATE_MEMORY = "nbgpu.engine.measurements:estimate_run"
    HELD_MEMORY = "nbgpu.engine.measurements:held_bytes"
    CHOOSE_FROM_DATA = "nbgpu.engine.measurements:choose_from_data"
    FIND_BATCH_SIZE = "nbgpu.engine.measurements:find_batch_size"

    PREDICT = "nbgpu.recipes.prediction:predict_share"
    CONCLUDE_PREDICTIONS = "nbgpu.recipes.prediction:conclude"

    SEND_VALUES = "nbgpu.engine.variables.transfer:send"
    RECEIVE_VALUES = "nbgpu.engine.variables.transfer:receive"
    SAVE_VARIABLES = "nbgpu.engine.saved_variables.saving:save"
    STAGE_VARIABLES = "nbgpu.engine.saved_variables.saving:stage"
    TAKE_STAGED = "nbgpu.engine.saved_variables.saving:take"
    DROP_STAGED = "nbgpu.engine.saved_variables.saving:drop"
    DESCRIBE_VARIABLES = "nbgpu.engine.variables.table:describe"
    CHECK_DEFINITIONS = "nbgpu.engine.variables.definitions:check"
    DEFINE = "nbgpu.engine.variables.definitions:define"
    REMEMBER_SOURCE = "nbgpu.engine.variables.definitions:remember_source"
    FIND_LACKING_NAMES = "nbgpu.engine.variables.definitions:lacking"
    FIND_NAMES = "nbgpu.engine.variables.completion:there"
    COMPLETE_NAME = "nbgpu.engine.variables.completion:complete"
    INSPECT_NAME = "nbgpu.engine.variables.completion:inspect"
    RUN_IMPORTS = "nbgpu.engine.variables.autoreload:run_imports"
    RELOAD_EDITED_MODULES = "nbgpu.engine.variables.autoreload:check"
    STOP_RELOADING = "nbgpu.engine.variables.autoreload:stop"
    KEPT_FAILURE = "nbgpu.engine.ipykernel.kept_failure:kept"

    DESCRIBE_HOST = "nbgpu.engine.process.host_calls:describe"
    """This function and those below are called on the engine of a host, which is not a rank."""
    CLOCK_OF_HOST = "time:time"
    CALL_ON_HOST = "nbgpu.engine.process.host_calls:call"
    FORK_ON_HOST = "nbgpu.engine.process.host_calls:fork"
    LOOK_ON_HOST = "nbgpu.engine.process.host_calls:look"
    CELL_LINE_ON_HOST = "nbgpu.engine.process.host_calls:cell_line"
    QUESTIONS_ON_HOST = "nbgpu.engine.process.host_calls:questions"
    CONTENT_ON_HOST = "nbgpu.engine.process.host_calls:content_of"
    NEW_LINES_ON_HOST = "nbgpu.engine.process.host_calls:new_lines"
    KEEP_COPY = "nbgpu.engine.process.host_calls:keep_copy"
    REMOVE_COPIES = "nbgpu.engine.process.host_calls:remove_copies"
    PUT_IN_COPY = "nbgpu.engine.process.host_calls:put_in_copy"
    SIZES_IN_COPY = "nbgpu.engine.process.host_calls:sizes_in_copy"
    CHANGES_IN_COPY = "nbgpu.engine.process.host_calls:changes_in_copy"
    END_HOST_SOON = "nbgpu.engine.process.host:end_soon"

    @property
    def module(self) -> str:
        """The module with the function."""
        return self.partition(":")[0]

    @property
    def function(self) -> str:
        """The function's name in its module."""
        return self.partition(":")[2]
