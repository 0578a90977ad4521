from __future__ import annotations

import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import train
from engine.config import OpsConfig, TrainConfig, resolve
from fusedops.slots import SLOTS
from models.transformer import PRESETS

CONFIGS = train.CONFIGS
OPTIONS = sorted(path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.glob("*/*.yaml"))
BESIDE = {
    "data/files": ["data.path=text.txt"],
    "data/hub": ["data.name=text"],
    "data/clicks": ["model=recommender"],
    "data/criteo": ["model=recommender", "data.path=clicks.csv"],
    "data/movielens": ["model=recommender", "data.path=ratings"],
    "experiment/recommender_movielens": ["data.path=ratings"],
}
"""What an option needs besides itself."""


def composed(*overrides: str, **kwargs):
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose("config", list(overrides), **kwargs)


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_every_option_of_every_group_composes(option):
    settings = resolve(composed(f"{option.parent}={option.stem}", *BESIDE.get(str(option), [])), train.MODELS)
    assert settings.values.train.steps > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_the_resolved_configuration_has_the_preset_filled_in(preset):
    resolved = resolve(composed(f"model.preset={preset}", "model.n_layer=2"), train.MODELS).resolved
    expected = {key: value for key, value in PRESETS[preset].items() if key != "n_layer"}
    assert expected.items() <= resolved["model"].items() and resolved["model"]["n_layer"] == 2
    # What was resolved resolves to itself, so that config.yaml repeats the run.
    again = OmegaConf.merge(composed(), OmegaConf.create(resolved))
    assert resolve(again, train.MODELS).resolved == resolved


def test_every_key_of_the_schema_has_a_default_of_its_type():
    values = resolve(composed(), train.MODELS).values
    assert dataclasses.asdict(values.train).keys() == {f.name for f in dataclasses.fields(TrainConfig)}
    assert [f.name for f in dataclasses.fields(OpsConfig)] == ["set", *SLOTS]
    assert all(getattr(values.ops, slot) is None for slot in SLOTS) and values.ops.set == "fused"
    assert values.tracker.mode == "offline" and values.baseline == "native"


@pytest.mark.parametrize(("name", "tokens_a_step"), [("transformer_d512", 32 * 512), ("transformer_d768", 16 * 1024)])
def test_the_experiments_see_at_least_20_million_tokens(name, tokens_a_step):
    values = resolve(composed(f"experiment={name}"), train.MODELS).values
    assert values.model.preset == name.replace("transformer", "gpt") and values.train.precision == "bf16"
    assert values.train.batch_size * PRESETS[values.model.preset]["context"] == tokens_a_step
    assert values.train.steps * tokens_a_step >= 20e6 and values.train.warmup_steps == 100


def test_the_command_line_overrides_an_experiment():
    values = resolve(composed("experiment=transformer_d512", "train.steps=7"), train.MODELS).values
    assert values.train.steps == 7 and values.train.batch_size == 32


def test_two_runs_in_one_second_get_two_directories():
    directories = {composed(return_hydra_config=True).hydra.run.dir for _ in range(2)}
    assert len(directories) == 2
    assert all(directory.startswith("runs/") for directory in directories)


def test_a_run_has_one_directory():
    config = composed(return_hydra_config=True)
    assert config.hydra.run.dir == config.hydra.run.dir


def test_nothing_outside_the_hydra_group_refers_to_it():
    config = composed()
    assert "hydra" not in OmegaConf.to_yaml(config, resolve=False)
