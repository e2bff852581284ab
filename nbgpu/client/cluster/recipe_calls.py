"""The calls of a cluster that take the settings of a recipe by name.

For editors and type checkers the parameters are in `recipe_calls.pyi`, recipe by recipe, which
docs/generate_stub.py writes from the settings. `cluster.train?` lists them with their help.
"""

from __future__ import annotations

import threading
from typing import Any

from nbgpu.client.cluster.parts import ClusterParts
from nbgpu.client.runs import planning
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.planning import BatchSizes
from nbgpu.client.runs.run import Run
from nbgpu.config import signatures, train_config


class RecipeCalls:
    """Checks settings that are given by name, and passes them on as one object."""

    parts: ClusterParts
    """The parts of the cluster, for nbgpu's own modules."""

    @signatures.lists_settings
    def train(self, recipe: str, **settings: Any) -> Run:
        """Start a training run on all ranks and return at once. A Stop during the call stops the run.

        cluster.train("autoencoder", steps=500, batch_size=4)
        cluster.train("survival", data="cohort.csv", preset="mace")

        Args:
            recipe: the recipe's name, such as 'autoencoder', or the path of your own.
            settings: fields of the recipe's settings, and `preset`, the name of values for those that are not
                given.

        Raises:
            ConfigError: a setting is not valid. Nothing was started.
            RankError: a setting is left to the files, and none of them can be used.
            RunError: another run has the ranks now.
        """
        return self.parts.runs.train_with(train_config(recipe, **settings))

    @signatures.lists_settings
    def plan(self, recipe: str, **settings: Any) -> Plan:
        """Say what a run with these settings will do, and estimate its memory. Nothing is started; the plan
        prints as lines.

        Raises:
            ConfigError: a setting is not valid.
            RunError: a training run has the ranks now.
        """
        return self.parts.runs.plan_with(train_config(recipe, **settings))

    @signatures.lists_settings
    def find_batch_size(
        self, recipe: str, stop: threading.Event | None = None, **settings: Any
    ) -> BatchSizes:
        """Find the largest batch that fits on all ranks, with real steps on generated batches. The result
        prints as a table.

        On CPU ranks `memory_limit` is the limit, or their share of the host's free memory. Variables of the
        ranks stay as they are, and their memory counts as used.

        Args:
            recipe: the recipe's name, such as 'autoencoder', or the path of your own.
            stop: ends the search when it is set, as the notebook's stop button does.
            settings: as for `train`; `batch_size` and `global_batch_size` do not count.

        Raises:
            ConfigError: a setting is not valid, or the strategy is fsdp; nothing was tried.
            RankError: not even one sample fits, or a step failed otherwise.
            RunError: a training run has the ranks now, or the search was stopped.
        """
        config = train_config(recipe, **planning.without_batch_sizes(settings))
        return self.parts.runs.find_batch_size_with(config, stop)
