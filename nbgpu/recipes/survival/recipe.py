"""The recipe: a network that learns from volumes, times and events to predict how soon an event will
occur."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.transforms import Compose
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.data import inspection
from nbgpu.engine.data.decoding import Decode, Item, opened, raise_together
from nbgpu.engine.data.loader import SampleLoader
from nbgpu.engine.data.sampling import Draw, augmentation
from nbgpu.engine.model.precision import at_least_float32
from nbgpu.engine.workload.recipe import CPU, Batch, Loaders, ParameterGroup, Predicted, Proposal
from nbgpu.errors import DataError
from nbgpu.planning.epochs import DataAmount
from nbgpu.protocol.records import HIGH, LOW
from nbgpu.recipes import verdict
from nbgpu.recipes.survival import metrics
from nbgpu.recipes.survival.baselines import (
    NAMES,
    fitted,
    fitted_with_chosen_penalty,
    radiomics,
    with_products,
)
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.cox import cox_loss, gathered
from nbgpu.recipes.survival.frozen import FROZEN, freezing
from nbgpu.recipes.survival.image_sizes import propose_sizes
from nbgpu.recipes.survival.metrics import Flags, Floats, Steps
from nbgpu.recipes.survival.network import SurvivalNetwork, load_weights
from nbgpu.recipes.survival.patients import Patients, Scale, load_patients
from nbgpu.recipes.survival.pictures import curves, slices
from nbgpu.recipes.survival.prediction import concordance_in_words, new_patients, risks
from nbgpu.recipes.survival.prepare import Prepare, cut_in_words
from nbgpu.run_folder.predictions import Job, Row

_MAX_FITTED, _MAX_REFERENCES = 1000, 500
"""The largest numbers of training patients whose volumes are read again: for the result, where baselines,
risk groups and baseline hazard are fitted to them, and for a prediction, where new patients are compared with
them."""
_FAR = 3.0
"""Radiomic features are clipped to so many standard deviations from the mean."""
_NUM_PICTURES = 6
_MOST_WEIGHTS_FOR_A_PATIENT = 100_000
"""With more weights for each training patient a warning says that the network may overfit."""
_DENSE_HU = 200
"""A voxel is dense, as those of a lesion or a calcification, if it is so many Hounsfield units above the
median of its volume."""
_NUM_TIMES = 25
"""The number of times, between the first and the last evaluation time, for the integrated Brier score."""


class Survival:
    """Trains a SurvivalNetwork with Cox's partial likelihood over the samples of all ranks.

    The data (`config.data`) are a generated cohort, or a CSV file with a volume, a time and an event in each
    row (`read_table`). All rows of a patient are in the same part of the data.
    """

    def __init__(self, config: SurvivalConfig) -> None:
        self.config = config

    @cached_property
    def _patients(self) -> Patients:
        """The patients of the run; DataError has a line for each bad row or file of the table."""
        return load_patients(self.config)

    # ---- data ----

    def build_loaders(self, rank: int, world_size: int, device: torch.device = CPU) -> Loaders:
        """Return the loaders of the rank's patients, with batches of the form of `example`. A DataError has a
        line for each bad row or file.

        The held-out volumes of a rank stay in memory.
        """
        config = self.config
        inspection.require_share(config, self._patients.items, self._steps(), rank, world_size)
        share = self._patients.parts.validation[rank::world_size]
        held_out = list(self._decoded(share[: config.num_evaluated(len(share))]))
        draw = Draw(augment=augmentation(config, ["image"], config.volume_shape, intensity_keys=["image"]))
        spreads = config.spread_events and config.dataset_kind != "smart"
        loader = SampleLoader(
            self._patients.parts,
            self._steps(),
            draw,
            config,
            rank=rank,
            world_size=world_size,
            device=device,
            is_rare=itemgetter("event") if spreads else None,
        )
        loaders = loader.loaders(held_out)
        summary, warnings = list(loaders.summary), list(loaders.warnings)
        if loader.num_rare_samples is not None:
            summary.append(_describe_events(loader.num_rare_samples, loader.num_micro_batches))
        if config.spacing and rank == 0:
            summary.append(cut_in_words(self._patients.items, config))
        if rank == 0 and (warning := self._too_many_weights()):
            warnings.append(warning)
        loaders = replace(loaders, summary=tuple(summary), warnings=tuple(warnings))
        return freezing(loaders, config.freeze_epochs) if config.freeze_epochs else loaders

    def _too_many_weights(self) -> str:
        """Return a warning if the network has so many weights that it may memorize the training patients;
        else an empty string."""
        if self.config.pretrained or self.config.data == "generated":
            return ""
        with torch.device("meta"):
            num_weights = sum(weight.numel() for weight in self.build_model().parameters())
        num_patients = len(self._patients.training)
        if num_weights <= _MOST_WEIGHTS_FOR_A_PATIENT * num_patients:
            return ""
        return (
            f"{self.config.resnet} has {num_weights / 1e6:.1f} million weights for {num_patients} training patients, and may "
            "learn them by heart: look at the held-out C-index. Smaller: widen_factor=0.25; or begin with pretrained weights"
        )

    def inspect(self) -> None:
        """Read all volumes.

        Raises:
            DataError: a line for each bad row, or, if there are none, for each bad volume.
        """
        inspection.require(self.config, self._patients.items, self._steps())

    def amount(self) -> DataAmount:
        """Return the amount of data; only names and headers of volumes are read."""
        return self._patients.parts.amount()

    def proposals(self, on_gpu: bool) -> list[Proposal]:
        """Propose sizes to which the volumes are resized, in the proportions of the median volume, the
        largest first. A DataError has a line for each bad row or file."""
        return propose_sizes([item["image"] for item in self._patients.items], self.config.spacing_mm, on_gpu)

    def _steps(self) -> Compose:
        """Return the transform that decodes a patient's Item."""
        config = self.config
        return Compose(
            [Prepare(config.volume_shape, config.hu_min, config.hu_max, config.split_seed, config.spacing_mm)]
        )

    def _decoded(self, items: Sequence[Item]) -> Iterator[dict[str, Tensor]]:
        """Yield the patients in batches of the form of `example`, in order.

        Raises:
            DataError: a line for each bad volume, after all volumes were read.
        """
        decode = Decode(self._steps())
        size = self.config.batch_size
        for first in range(0, len(items), size):
            decoded = [decode(item) for item in items[first : first + size]]
            if not decode.failures:
                samples = [opened(one) for one in decoded]
                names = [name for name, value in samples[0].items() if isinstance(value, Tensor)]
                yield {name: torch.stack([sample[name] for sample in samples]) for name in names}
        raise_together(decode.failures)

    # ---- model and loss ----

    def build_model(self) -> nn.Module:
        """Return a SurvivalNetwork. DataError if the file with its weights is unusable."""
        config = self.config
        return SurvivalNetwork(
            config.resnet,
            len(config.features),
            config.widening,
            config.stem_stride,
            load_weights(Path(config.pretrained).expanduser()) if config.pretrained else None,
        )

    def example(self, batch_size: int) -> Batch:
        """Return `image` (N, 1, D, H, W) from 0 to 1, `features` (N, F), and (N,) each: `order` of the
        patients' times, `event` (1: it has occurred), and `number` of the patient."""
        return {
            "image": torch.rand(batch_size, 1, *self.config.volume_shape),
            "features": torch.randn(batch_size, len(self.config.features)),
            "order": torch.arange(batch_size),
            "event": torch.ones(batch_size, dtype=torch.int64),
            "number": torch.arange(batch_size),
        }

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Return the ResNet's four stages."""
        assert isinstance(model, SurvivalNetwork)
        encoder = model.encoder
        return [encoder.layer1, encoder.layer2, encoder.layer3, encoder.layer4]

    def parameter_groups(self, model: nn.Module) -> Sequence[ParameterGroup]:
        """Return the ResNet's weights, which learn at `encoder_lr_factor` times the rate, and the last
        layer's."""
        assert isinstance(model, SurvivalNetwork)
        factor = self.config.encoder_lr_factor
        return [
            ParameterGroup("encoder", list(model.encoder.parameters()), factor),
            ParameterGroup("head", list(model.head.parameters())),
        ]

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `loss`, the negative log partial likelihood per event of the samples of all ranks, and
        `events`, the number of events among them; both are scalars. Without events the loss and its
        gradients are 0.
        """
        is_frozen = FROZEN in batch and bool(batch[FROZEN].all())
        scores = at_least_float32(model(batch["image"], batch["features"], is_frozen))
        samples = scores, batch["order"], batch["event"]
        # A model that is not wrapped runs on one rank alone, as in a test.
        if isinstance(model, DistributedDataParallel | FSDPModule):
            samples = gathered(*samples)
        return {"loss": cox_loss(*samples, self.config.ties), "events": samples[2].double().sum()}

    def validate(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return `score`, the log hazard, and `number` of each patient, shape (N,)."""
        return {"score": _scores(model, batch), "number": batch["number"]}

    def judge(self, values: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Return `loss` and `c_index` of all held-out patients together, and the ends of the C-index's
        bootstrap interval; no `c_index` if no pair of them can be ordered. `values` holds what `validate`
        returned for all held-out patients."""
        numbers = np.array(values["number"], dtype=np.intp)
        # The bootstrap draws patients by their position in the arrays, so that they are sorted: the order in
        # which the ranks return them may differ from run to run.
        in_order = numbers.argsort()
        scores = np.array(values["score"])[in_order]
        times, events = self._outcomes(numbers[in_order])
        loss = cox_loss(
            torch.as_tensor(scores), torch.as_tensor(times), torch.as_tensor(events), self.config.ties
        )
        concordance = metrics.c_index(scores, times, events)
        # NaN scores, of a model that diverged, give NaN too, which is shown and not left out.
        if np.isnan(concordance) and not np.isnan(scores).any():
            return {"loss": float(loss)}
        low, high = metrics.c_index_interval(scores, times, events, self.config.split_seed)
        ends = {f"c_index{LOW}": low, f"c_index{HIGH}": high}
        return {"loss": float(loss), "c_index": concordance, **ends}

    def _outcomes(self, numbers: NDArray[np.intp]) -> tuple[Floats, Flags]:
        """Return (times, events) of the patients with these numbers, (N,) each."""
        return self._patients.times[numbers], self._patients.events[numbers]

    # ---- result ----

    def samples_of_result(self) -> Sequence[Item]:
        """Return the training patients to whom baselines are fitted, followed by the held-out patients that
        the result is about."""
        patients = self._patients
        if not (reported := patients.parts.reported):
            return []
        fitted_on = (patients.items[number] for number in self._fitted_numbers())
        return [*fitted_on, *reported[: self.config.num_evaluated(len(reported))]]

    def _fitted_numbers(self, most: int = _MAX_FITTED) -> list[int]:
        """Return the numbers of at most `most` training patients, drawn at random with the seed of the split,
        so that every call draws the same."""
        shuffled = np.random.RandomState(self.config.split_seed).permutation(self._patients.num_training)
        return [int(number) for number in shuffled[: self.config.num_evaluated(most)]]

    def evaluate(
        self, model: nn.Module, device: torch.device, samples: Sequence[Item]
    ) -> list[dict[str, float]]:
        """Return for each patient the `number`, the log hazard as `score`, and the features of `radiomics` by
        NAMES."""
        dense = _DENSE_HU / (self.config.hu_max - self.config.hu_min)
        rows = []
        for batch in self._decoded(samples):
            numbers, scores = batch["number"].tolist(), _log_hazards(model, device, batch).tolist()
            for number, score, image in zip(numbers, scores, batch["image"][:, 0].numpy(), strict=True):
                features = zip(NAMES, radiomics(image, dense).tolist(), strict=True)
                rows.append({"number": number, "score": score, **dict(features)})
        return rows

    def result(
        self, model: nn.Module, device: torch.device, evaluated: Sequence[dict[str, float]] | None = None
    ) -> dict[str, Any]:
        """Evaluate predictions for the held-out patients beside baselines.

        Returns `table`, `note` and `images`; `evaluated` is from `evaluate`.

        `c_index` is Harrell's, with the ends of a bootstrap interval that holds 95 % of the draws, and
        `uno_c` Uno's, up to the last of the times. `auc_T` says how well events up to the time T are
        separated from later ones, and `ibs` is the mean Brier score between the first and the last of these
        times: 0 is perfect, and lower is better.
        """
        patients = self._patients
        if not patients.parts.reported:
            return {"table": {}, "note": "Nothing was held out (val_fraction=0): no result.", "images": {}}
        if evaluated is None:
            evaluated = self.evaluate(model, device, self.samples_of_result())
        num_fitted = len(self._fitted_numbers())
        training = _Evaluated(self, evaluated[:num_fitted])
        held_out = _Evaluated(self, evaluated[num_fitted:])
        # The scores of each method for (training, held-out) patients.
        predictions: dict[str, tuple[Floats, Floats]] = {
            self.config.resnet: (training.scores, held_out.scores)
        }
        titles = {"dense voxels": f"voxels {_DENSE_HU} HU above the median"}
        for name in ("mean intensity", "dense voxels"):
            column = [NAMES.index(name)]
            scores = self._linear(training.radiomics[:, column], held_out.radiomics[:, column], training)
            predictions[titles.get(name, name)] = scores
        predictions |= self._score_radiomics(training, held_out)
        if self.config.features:
            predictions["features alone"] = self._linear(training.features, held_out.features, training)
        if (true := patients.true_log_hazards) is not None:
            predictions["true hazard"] = (true[training.numbers], true[held_out.numbers])
        predictions["no prediction"] = (np.zeros(len(training.numbers)), np.zeros(len(held_out.numbers)))
        when = self._eval_times()
        observed = metrics.censoring(*self._training_outcomes())
        table = {
            name: _metrics_row(*scores, training, held_out, when, observed, self.config.split_seed)
            for name, scores in predictions.items()
        }
        # The note compares the network with the truth, or with the best baseline if that is not known.
        c_index, low, high = (table[self.config.resnet][name] for name in ("c_index", "c_low", "c_high"))
        others = {name: row["c_index"] for name, row in table.items() if name != self.config.resnet}
        best = "true hazard" if "true hazard" in others else max(others, key=others.__getitem__)
        num_events = int(patients.events[held_out.numbers].sum())
        few = verdict.too_few(num_events, "events")
        note = (
            f"On {len(held_out.numbers)} held-out patients with {num_events} events the C-index is {c_index:.3f} (95 % "
            f"interval {low:.3f} to {high:.3f}), and that of '{best}' {others[best]:.3f}. {few + '. ' if few else ''}Hazards, groups and baselines were fitted on "
            f"{len(training.numbers)} training patients."
            + _explain_unknown(when, observed)
            + patients.parts.in_words(self.config)
        )
        return {"table": table, "note": note, "images": self._pictures(training, held_out)}

    def _eval_times(self) -> Floats:
        """Return the times at which predictions are evaluated: those of the settings, or the quartiles of the
        training patients' event times."""
        if self.config.eval_times:
            return np.array(self.config.eval_times)
        times, events = self._training_outcomes()
        return np.asarray(np.quantile(times[events], [0.25, 0.5, 0.75]))

    def _training_outcomes(self) -> tuple[Floats, Flags]:
        """Return (times, events) of all training patients, (N,) each."""
        return self._outcomes(np.arange(self._patients.num_training))

    def _linear(self, fitted_on: Floats, held_out: Floats, training: _Evaluated) -> tuple[Floats, Floats]:
        """Fit Cox's linear model to covariates of the training patients, and return its scores.

        Args:
            fitted_on: the covariates of the training patients, (N, F).
            held_out: those of the held-out patients, (M, F).
            training: the training patients, with their outcomes.

        Returns:
            The scores of the training patients (N,) and of the held-out patients (M,).
        """
        fitted_on, held_out = _standardised(fitted_on, held_out)
        weights = fitted(fitted_on, training.times, training.events, self.config.ties)
        return fitted_on @ weights, held_out @ weights

    def _score_radiomics(
        self, training: _Evaluated, held_out: _Evaluated
    ) -> dict[str, tuple[Floats, Floats]]:
        """Return, by name, the scores (training, held-out) of Cox's model with all radiomic features, and
        with these features and their products."""
        # A patient far outside the others would get a score whose exponential overflows.
        features = [
            np.clip(part, -_FAR, _FAR) for part in _standardised(training.radiomics, held_out.radiomics)
        ]
        scores = {}
        for name, (fitted_on, others) in {
            f"{len(NAMES)} radiomic features": features,
            "these and their products": [with_products(part) for part in features],
        }.items():
            weights = fitted_with_chosen_penalty(
                fitted_on, training.times, training.events, self.config.ties, self.config.split_seed
            )
            scores[name] = (fitted_on @ weights, others @ weights)
        return scores

    # ---- new data ----

    def new_samples(self, data: str) -> tuple[Sequence[Item], list[str]]:
        """Return the patients of a table, which needs no outcomes, and a line for each bad row.

        Raises:
            DataError: the table cannot be used, or features are in the scale of training patients that cannot
                be read.
        """
        if not self.config.features:
            return new_patients(self.config, Scale.of_nothing(), data)
        try:
            scale = self._patients.scale
        except DataError as error:
            raise DataError(
                f"{', '.join(self.config.features)}: their scale is that of the training patients, who cannot be read:\n{error}"
            ) from None
        return new_patients(self.config, scale, data)

    def reference_samples(self) -> Sequence[Item]:
        """Return the training patients to whom hazards and risk groups are fitted; none if their data are
        gone, so that a model can be used elsewhere."""
        if self._explain_no_training_patients():
            return []
        return [self._patients.items[number] for number in self._fitted_numbers(_MAX_REFERENCES)]

    def _explain_no_training_patients(self) -> str:
        """Return why the training patients cannot be read, as on a machine without the training data; empty
        if they can be."""
        try:
            self._training_outcomes()
        except DataError as error:
            return str(error)
        return ""

    def predict(self, model: nn.Module, device: torch.device, sample: Item, stem: Path) -> Predicted:
        """Return a patient's `log_hazard`."""
        (batch,) = self._decoded([sample])
        return Predicted(
            {"log_hazard": round(float(_log_hazards(model, device, batch)[0]), 6)},
            aside={"number": sample["number"], "outcome": sample.get("outcome")},
        )

    def conclude(
        self, rows: Sequence[Row], references: Sequence[Row], job: Job
    ) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Compare the new patients with the training patients.

        Args:
            rows: the predictions for the new patients.
            references: the predictions for `reference_samples`.
            job: unused.

        Returns:
            (`risks` of each new patient by name, sentences about the comparison and about the C-index of the
            new patients with known outcomes).

        Raises:
            DataError: fewer than two training patients could be read, or none with an event.
        """
        if reason := self._explain_no_training_patients():
            note = (
                "There are no risk groups, percentiles and probabilities: they compare with the training patients, who cannot "
                f"be read:\n{reason}"
            )
            return {}, [note, *concordance_in_words(rows)]
        numbers = np.array([row.aside["number"] for row in references], dtype=np.intp)
        scores = np.array([row.values["log_hazard"] for row in references])
        times, events = self._outcomes(numbers)
        if len(references) < 2 or not events.any():
            raise DataError(
                f"{self.config.data}: {len(references)} training patients with {events.sum()} events could be read; without "
                "them a score means nothing"
            )
        columns = risks(rows, scores, times, events, self._eval_times(), self.config.risk_groups)
        note = f"Risk groups and probabilities were fitted on {len(references)} training patients with {events.sum()} events"
        return columns, [note, *concordance_in_words(rows)]

    def _pictures(self, training: _Evaluated, held_out: _Evaluated) -> dict[str, str]:
        """Draw the Kaplan-Meier curves of the risk groups of the held-out patients, and projections of some
        volumes in order of their risk. The thresholds between the groups are quantiles of the training
        patients' scores. Return {caption: PNG as a data URI}."""
        num_groups = self.config.risk_groups
        thresholds = np.quantile(training.scores, np.arange(1, num_groups) / num_groups)
        groups = metrics.risk_groups(held_out.scores, thresholds)
        by_risk = np.argsort(held_out.scores)
        num_shown = min(_NUM_PICTURES, len(by_risk))
        shown = by_risk[np.linspace(0, len(by_risk) - 1, num_shown).round().astype(int)]
        items = [self._patients.items[held_out.numbers[index]] for index in shown]
        images = [batch["image"] for batch in self._decoded(items)]
        return {
            "held-out patients by predicted risk, as Kaplan and Meier": curves(
                held_out.times, held_out.events, groups, num_groups
            ),
            "from the lowest predicted risk to the highest, the brightest of each line of sight": slices(
                list(torch.cat(images))
            ),
        }


class _Evaluated:
    """The features and outcomes of some patients, and the network's scores for them. Arrays have one row for
    each patient."""

    def __init__(self, recipe: Survival, rows: Sequence[dict[str, float]]) -> None:
        self.numbers: NDArray[np.intp] = np.array([row["number"] for row in rows], dtype=np.intp)
        self.radiomics = np.array([[row[name] for name in NAMES] for row in rows])
        items = [recipe._patients.items[number] for number in self.numbers]
        # As float32, in which the network has seen them.
        self.features = np.array([item["features"] for item in items], dtype=np.float32).astype(np.float64)
        self.scores = np.array([row["score"] for row in rows])
        self.times, self.events = recipe._outcomes(self.numbers)


def _standardised(training: Floats, held_out: Floats) -> tuple[Floats, Floats]:
    """Return both (N, F), in standard deviations of the training patients from their means."""
    mean, deviation = training.mean(axis=0), np.maximum(training.std(axis=0), 1e-12)
    return (training - mean) / deviation, (held_out - mean) / deviation


def _metrics_row(
    fitted_on: Floats,
    scores: Floats,
    training: _Evaluated,
    held_out: _Evaluated,
    when: Floats,
    observed: Steps,
    seed: int,
) -> dict[str, float]:
    """Compute the metrics of a method on the held-out patients, rounded.

    Args:
        fitted_on: the method's scores for the training patients, to which the baseline hazard is fitted.
        scores: its scores for the held-out patients.
        training, held_out: the outcomes of both.
        when: the evaluation times.
        observed: the probability of still being observed, from the training patients.
        seed: the seed of the bootstrap interval.
    """
    times, events = held_out.times, held_out.events
    low, high = metrics.c_index_interval(scores, times, events, seed)
    row = {
        "c_index": metrics.c_index(scores, times, events),
        "c_low": low,
        "c_high": high,
        "uno_c": metrics.uno_c_index(scores, times, events, observed, when[-1]),
    }
    areas = metrics.auc(scores, times, events, when, observed)
    row |= {f"auc_{time:.4g}": area for time, area in zip(when, areas, strict=True)}
    within = when[metrics.is_known(when, observed)]
    if len(within) > 1:
        grid = np.linspace(within[0], within[-1], _NUM_TIMES)
        # Subtracting a constant changes no probability, and keeps the exponentials small.
        constant = fitted_on.mean()
        baseline = metrics.baseline_hazard(fitted_on - constant, training.times, training.events)
        probabilities = metrics.survival(scores - constant, baseline, grid)
        row["ibs"] = metrics.integrated(metrics.brier(probabilities, times, events, grid, observed), grid)
    return {name: round(float(value), 4) for name, value in row.items()}


def _explain_unknown(when: Floats, observed: Steps) -> str:
    """Return a sentence about the evaluation times beyond the training follow-up, at which AUC and Brier
    score are not defined; empty if there are none."""
    unknown = when[~metrics.is_known(when, observed)]
    if not len(unknown):
        return ""
    return (
        f" At {', '.join(f'{time:.4g}' for time in unknown)} neither AUC nor Brier score is known: no training patient is "
        f"observed beyond {observed.times[-1]:.4g}, so that ibs leaves them out."
    )


@torch.no_grad()
def _scores(model: nn.Module, batch: Batch) -> Tensor:
    """Return the log hazards of a batch, (N,). The forward pass of DDP is left out, because it may call
    collectives, and the ranks have different numbers of batches."""
    network = model.module if isinstance(model, DistributedDataParallel) else model
    return at_least_float32(network(batch["image"], batch["features"]))


def _log_hazards(model: nn.Module, device: torch.device, batch: Batch) -> Tensor:
    """Return the scores of a batch that is on the CPU, (N,) in float64 on the CPU."""
    dtype = next(model.parameters()).dtype
    on_device = {name: batch[name].to(device, dtype) for name in ("image", "features")}
    return _scores(model, on_device).double().cpu()


def _describe_events(num_events: int, num_micro_batches: int) -> str:
    """Return a sentence about the number of events in a micro-batch, among which the loader divides the
    events evenly. A micro-batch without events has no gradient."""
    fewest, rest = divmod(num_events, num_micro_batches)
    if not fewest:
        return (
            f"{num_events} events in an epoch of {num_micro_batches} micro-batches: one each in {num_events} of them, and "
            "the others learn nothing. With a larger batch_size they are fewer"
        )
    share = f"{fewest} or {fewest + 1}" if rest else f"{fewest}"
    return f"{num_events} events in an epoch: {share} in each micro-batch of all ranks together"
