"""What every script takes: values that no later check would explain, and what may change on resume."""

import dataclasses

import pytest

import train_edit_ddp
import train_mmdit
from utils.run_options import MAY_CHANGE, check_options


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_steps": 0}, "--num_steps must be at least 1, got 0"),
        ({"sample_steps": -1}, "--sample_steps must be at least 1, got -1"),
        ({"dtype": "float16"}, "--dtype must be one of auto, float32, bfloat16, got 'float16'"),
        ({"reduce_dtype": "auto"}, "--reduce_dtype must be one of float32, bfloat16, got 'auto'"),
        ({"lr_schedule": "linear"}, "--lr_schedule must be one of cosine, constant, wsd, got 'linear'"),
        ({"save_every": -1}, "--save_every must not be negative, got -1"),
        ({"shard_cache_gib": -0.5}, "--shard_cache_gib must not be negative, got -0.5"),
        ({"metrics_port": 70000}, "--metrics_port must be at most 65535, got 70000"),
        ({"lr": float("inf")}, "--lr must be at least 0 and below inf, got inf"),
        ({"warmup_steps": -1}, "--warmup_steps must be at least 0 and below inf, got -1"),
        ({"t_std": -0.5}, "--t_std must be at least 0 and below inf, got -0.5"),
        ({"t_mean": float("-inf")}, "--t_mean must be finite, got -inf"),
        ({"beta1": 1.0}, "--beta1 must be at least 0 and below 1, got 1.0"),
        ({"lora_rank": -4}, "--lora_rank must be at least 0 and below inf, got -4"),
        ({"lora_dropout": 1.0}, "--lora_dropout must be at least 0 and below 1, got 1.0"),
        ({"sample_cfg_scale": -1.0}, "--sample_cfg_scale must not be negative, got -1.0"),
        ({"sample_cfg_scale": float("inf")}, "--sample_cfg_scale must be at least 0 and below inf, got inf"),
        ({"max_grad_norm": 0.0}, "--max_grad_norm must be above 0, got 0.0; inf clips nothing"),
        ({"optimizer": "sgd"}, "--optimizer must be one of adamw, muon, got 'sgd'"),
    ],
)
@pytest.mark.parametrize("script", [train_mmdit, train_edit_ddp])
def test_a_value_that_no_later_check_would_explain_is_refused(script, wrong, message):
    with pytest.raises(ValueError, match=message):
        check_options(dataclasses.replace(script.Config(), **wrong), optimizer=("adamw", "muon"))
    check_options(script.Config(), optimizer=("adamw", "muon"))


def test_weights_of_the_planner_are_numbers_too():
    for wrong in ({"plan_weight": -1.0}, {"plan_weight": float("inf")}, {"planner_lr": -1.0}):
        with pytest.raises(ValueError, match="must be at least 0 and below inf"):
            check_options(dataclasses.replace(train_edit_ddp.Config(), **wrong))
    check_options(dataclasses.replace(train_edit_ddp.Config(), plan_weight=0.0, max_grad_norm=float("inf")))


def test_what_may_change_names_fields_of_the_scripts():
    known = {field.name for script in (train_mmdit, train_edit_ddp) for field in dataclasses.fields(script.Config)}
    assert known >= MAY_CHANGE
    assert not MAY_CHANGE & {"lr", "seed", "data", "model", "global_batch_size", "dtype", "t_mean", "max_pixels"}
