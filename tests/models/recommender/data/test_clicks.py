"""data=clicks: the shape of the log, the skew of its ids, and the planted model behind its labels."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from models.recommender.data import ClicksConfig, load
from models.recommender.data import clicks as module
from models.recommender.data.clicks import CARDINALITIES, MULTI_VALUED, PAIRS, F
from models.recommender.data.hashing import mix64, normals
from models.recommender.data.source import part_of
from models.recommender.metrics import auc, logloss


def log_of(batch_size: int = 512, eval_batch_size: int = 1000, seed: int = 0, **keys):
    return load(ClicksConfig(**{"validation_samples": 20_000, **keys}), batch_size, eval_batch_size, seed)


@pytest.fixture
def seed() -> int:
    """Of a planted model that no other run of the tests has."""
    return int(np.random.default_rng().integers(2**31))


def test_a_batch_has_criteos_shape(seed: int, check_batch) -> None:
    log = log_of(batch_size=333, seed=seed)
    assert (log.n_dense, len(log.features)) == (13, 26)
    assert check_batch(log.batch(0), log) == 333
    assert [i for i, feature in enumerate(log.features) if feature.multi_valued] == list(MULTI_VALUED)
    assert [feature.rows for feature in log.features] == [max(1000, min(n, 10_000)) for n in CARDINALITIES]


def test_a_batch_is_a_function_of_seed_step_and_rank(seed: int) -> None:
    log, again = log_of(seed=seed), log_of(seed=seed)
    first = log.batch(4, rank=1)
    log.batch(5)
    assert all(
        torch.equal(first[name], batch[name]) for batch in (log.batch(4, 1), again.batch(4, 1)) for name in first
    )
    for other in (log.batch(5, 1), log.batch(4, 0), log_of(seed=seed ^ 1).batch(4, 1)):
        assert not torch.equal(first["dense"], other["dense"])


def test_the_validation_set_depends_on_the_datas_seed_alone(seed: int, bags, check_batch) -> None:
    sizes = 1_000, 7_777
    logs = [log_of(eval_batch_size=size, seed=s, validation_samples=8_200) for s, size in enumerate(sizes)]
    parts = [[(batch, log) for batch in log.validation()] for log in logs]
    for size, of_one in zip(sizes, parts, strict=True):
        counts = [check_batch(batch, log) for batch, log in of_one]
        assert sum(counts) == logs[0].validation_samples == 8_200 and max(counts) <= size
    first, second = ([bag for batch, _ in of_one for bag in bags(batch, F)] for of_one in parts)
    assert first == second
    for name in ("dense", "labels"):
        assert torch.equal(*(torch.cat([batch[name] for batch, _ in of_one]) for of_one in parts))
    other = next(iter(log_of(validation_samples=8_200).validation()))
    assert torch.equal(other["labels"], parts[0][0][0]["labels"])
    drawn_otherwise = load(ClicksConfig(seed=1 + seed % 1000, validation_samples=8_200), 8, 1000, 0)
    assert not torch.equal(next(iter(drawn_otherwise.validation()))["dense"], other["dense"])
    assert len({logs[0].digest, logs[1].digest}) == 1 and drawn_otherwise.digest != logs[0].digest


def test_ids_are_64_bits_and_belong_to_one_feature() -> None:
    batch = log_of(batch_size=2000).batch(0)
    bounds = batch["offsets"][:: len(batch["labels"])].tolist()
    ids = [set(batch["ids"][a:b].tolist()) for a, b in pairwise(bounds)]
    assert len(set.union(*ids)) == sum(map(len, ids))
    everything = torch.tensor(sorted(set.union(*ids)))
    assert (everything < 0).float().mean().sub(0.5).abs() < 0.05
    assert everything.min() < -(2**62) and everything.max() > 2**62


@pytest.mark.parametrize("skew", [1.05, 1.7])
def test_the_ids_of_a_feature_follow_the_power_law(skew: float, seed: int) -> None:
    count = 100_000
    log = log_of(batch_size=count, skew=skew, seed=seed)
    batch = log.batch(0)
    ids, bounds = batch["ids"], batch["offsets"][::count].tolist()
    for feature, cardinality in ((0, 1_460), (2, 10_000), (8, 3)):
        found = sorted(Counter(ids[bounds[feature] : bounds[feature + 1]].tolist()).values(), reverse=True)
        edges = np.arange(1, cardinality + 2, dtype=np.float64) ** (1 - skew)
        share = np.diff(edges) / (edges[-1] - edges[0])
        for rank in range(min(20, cardinality)):
            deviation = np.sqrt(share[rank] * count) + 1
            assert abs(found[rank] - share[rank] * count) < 6 * deviation
        assert len(found) <= cardinality
    assert np.isclose(share.sum(), 1)


def test_bags_are_empty_single_and_long() -> None:
    batch = log_of(batch_size=20_000).batch(0)
    lengths = batch["offsets"].diff().view(F, -1)
    for feature in MULTI_VALUED:
        assert lengths[feature].float().mean() == pytest.approx(2.0, abs=0.1)
        assert (lengths[feature] == 0).float().mean() == pytest.approx(1 / 3, abs=0.02)
        assert 8 < lengths[feature].max() <= 20


def samples_of(log, count: int):
    return log._samples(np.random.default_rng(), count)


def test_ids_and_pairs_carry_most_of_the_logit_and_its_parts_are_uncorrelated(seed: int) -> None:
    for data_seed in (0, seed):
        log = load(ClicksConfig(seed=data_seed), 8, 8, 0)
        parts = np.stack(log.parts(samples_of(log, 60_000)))
        shares = np.var(parts, axis=1) / np.var(parts.sum(axis=0))
        assert shares[1] + shares[2] >= 0.6 and shares[1] > 0.2 and shares[2] > 0.15
        correlation = np.corrcoef(parts)
        assert np.abs(correlation[np.triu_indices(3, 1)]).max() < 0.06
        told = log.variance_shares()
        assert told["ids"] + told["pairs"] >= 0.6
        assert list(told.values()) == pytest.approx(shares.tolist(), abs=0.08)
        assert f"{told['ids']:.0%} of its variance from single ids and {told['pairs']:.0%} from pairs" in log.describe()


def test_a_pair_has_nothing_that_an_id_has_by_itself(seed: int) -> None:
    log = load(ClicksConfig(seed=seed), 8, 8, 0)
    count = 60_000
    samples = samples_of(log, count)
    pairs = log.parts(samples).pairs
    explained = 0.0
    for feature in {feature for pair in PAIRS for feature in pair} - set(MULTI_VALUED):
        ids = samples.ids[np.searchsorted(samples.feature, feature) :][:count]
        _, index, counts = np.unique(ids, return_inverse=True, return_counts=True)
        means = np.bincount(index, pairs) / counts
        frequent = counts > 2000
        explained += float((means[frequent] ** 2 * counts[frequent]).sum() / count)
    assert explained < 0.02 * np.var(pairs)


def test_without_pairs_or_without_ids_the_best_there_is_falls_short(seed: int) -> None:
    for data_seed in (0, seed):
        log = load(ClicksConfig(seed=data_seed), 100_000, 8, 0)
        generator = np.random.default_rng()
        samples = log._samples(generator, 100_000)
        parts = log.parts(samples)
        clicked = generator.random(100_000) < 1 / (1 + np.exp(-log._logits(samples)))
        labels = torch.from_numpy(clicked.astype(np.float32))
        reached = [
            auc(torch.from_numpy(logit), labels)
            for logit in (np.sum(parts, axis=0), parts.dense + parts.ids, parts.dense + parts.pairs, parts.dense)
        ]
        assert 0.8 < reached[0] < 0.9
        assert reached[0] - max(reached[1:]) > 0.03 and reached[1] - reached[3] > 0.1


def test_the_ceiling_is_that_of_the_model_that_drew_the_labels(seed: int) -> None:
    log = load(ClicksConfig(seed=seed, validation_samples=50_000), 8, 3_000, 0)
    ceiling = log.ceiling()
    blocks = list(log._validation())
    logits = torch.cat([torch.from_numpy(logits) for _, logits in blocks])
    labels = torch.cat([batch["labels"] for batch in log.validation()])
    assert (ceiling.auc, ceiling.logloss) == (auc(logits, labels), logloss(logits, labels))
    assert f"AUC {ceiling.auc:.4f}, logloss {ceiling.logloss:.4f}" in log.describe()
    # Clicks are drawn with the planted probability: its logloss is its mean entropy, and scaled it is worse.
    p = torch.sigmoid(logits.double())
    entropy = -(p * p.log() + (1 - p) * (1 - p).log()).mean().item()
    assert ceiling.logloss == pytest.approx(entropy, abs=0.01)
    assert logloss(0.8 * logits, labels) > ceiling.logloss < logloss(1.2 * logits, labels)
    assert labels.mean() == pytest.approx(0.25, abs=0.01)
    constant = log.references()["constant"]
    assert constant.auc == 0.5 and constant.logloss == pytest.approx(0.5623, abs=0.012)
    assert constant.logloss - ceiling.logloss > 0.1


def test_the_logit_is_a_function_of_the_batch_alone(seed: int) -> None:
    log = load(ClicksConfig(seed=seed), 64, 8, 0)
    samples = samples_of(log, 64)
    together = np.stack(log.parts(samples))
    # One by one, in a log of another training seed that has seen nothing else.
    other = load(ClicksConfig(seed=seed), 64, 8, 5)
    bounds = np.concatenate(([0], np.cumsum(samples.lengths)))
    lengths = samples.lengths.reshape(F, 64)
    for i in np.random.default_rng().integers(64, size=5):
        taken = np.concatenate([np.arange(bounds[f * 64 + i], bounds[f * 64 + i + 1]) for f in range(F)])
        alone = module.Samples(samples.dense[i : i + 1], samples.ids[taken], samples.feature[taken], lengths[:, i])
        np.testing.assert_allclose(np.stack(other.parts(alone))[:, 0], together[:, i], rtol=1e-4, atol=1e-5)


def test_criteos_own_cardinalities_need_no_table(check_batch) -> None:
    started = time.process_time()
    log = log_of(max_ids=2**40, skew=1.05)
    assert max(feature.rows for feature in log.features) == 10_131_227
    assert check_batch(log.batch(0), log) == 512
    assert time.process_time() - started < 5
    assert max(array.nbytes for array in vars(log).values() if isinstance(array, np.ndarray)) < 10_000


def test_drawing_is_faster_than_training() -> None:
    log = log_of(batch_size=2048)
    log.batch(0)
    started = time.process_time()
    for step in range(20):
        log.batch(step)
    assert 20 * 2048 / (time.process_time() - started) > 100_000  # 350,000 on a core that does nothing else


def test_part_of_a_batch_is_the_batch_of_those_samples(bags, check_batch) -> None:
    log = log_of(batch_size=97)
    batch = log.batch(0)
    for part in (slice(0, 97), slice(0, 1), slice(13, 60), slice(90, 200)):
        taken = part_of(batch, F, part)
        check_batch(taken, log)
        assert bags(taken, F) == bags(batch, F)[part]
        assert torch.equal(taken["dense"], batch["dense"][part])
        assert torch.equal(taken["labels"], batch["labels"][part])


def test_hashes_are_a_bijection_and_their_normals_are_normal() -> None:
    keys = np.concatenate([np.arange(-1000, 100_000), [2**63 - 1, -(2**63)]]).astype(np.int64)
    hashed = mix64(keys)
    assert len(np.unique(hashed)) == len(keys)
    flipped = np.unpackbits((hashed[:-3] ^ hashed[1:-2]).view(np.uint8)).mean()
    assert flipped == pytest.approx(0.5, abs=0.005)
    # The first output of SplitMix64 seeded with 0, as its authors publish it.
    assert int(mix64(np.zeros(1, dtype=np.int64))[0]) == 0xE220A8397B1DCDAF
    drawn = normals(hashed).astype(np.float64)
    assert drawn.shape == (len(keys), 4)
    assert np.abs(drawn.mean(axis=0)).max() < 0.02 and np.abs(np.cov(drawn.T) - np.eye(4)).max() < 0.03
    assert np.abs((drawn**4).mean(axis=0) - 3).max() < 0.2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"skew": 1.0}, r"data\.skew=1\.0: must be at least 1\.01 and at most 3"),
        ({"max_ids": 1}, r"data\.max_ids=1: must be at least 2"),
        ({"validation_samples": 10}, r"data\.validation_samples=10"),
        ({"seed": -1}, r"data\.seed=-1"),
        ({"name": "criteo"}, r"data\.name=criteo: allowed: clicks"),
    ],
    ids=str,
)
def test_keys_out_of_range_are_refused(keys, message) -> None:
    with pytest.raises(ValueError, match=message):
        ClicksConfig(**keys)
