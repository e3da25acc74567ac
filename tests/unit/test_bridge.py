"""Megatron-Bridge's container read as Megatron's arguments; refusals name its fields."""

from types import SimpleNamespace

import pytest

from megatron.compression import CompressionConfigError
from megatron.compression.frontends import bridge
from megatron.compression.patches import running


def container(model_config: bool = False, **changes) -> SimpleNamespace:
    """Fields of Megatron-Bridge's ``ConfigContainer``, by part, at the values of a small run."""
    parts = dict(
        model=dict(
            **dict(
                transformer_impl="transformer_engine", num_layers=4, hidden_size=256, seq_length=64
            ),
            **dict(
                tensor_model_parallel_size=2,
                pipeline_model_parallel_size=2,
                context_parallel_size=1,
            ),
            **dict(
                expert_model_parallel_size=1, expert_tensor_parallel_size=None, num_moe_experts=None
            ),
            **dict(sequence_parallel=True, bf16=True, fp16=False),
            **dict(cuda_graph_impl="none", cuda_graph_modules=[]),
            **dict(
                moe_token_dispatcher_type="alltoall",
                moe_latent_size=None,
                moe_pad_expert_input_to_capacity=False,
                multi_latent_attention=False,
            ),
            **dict(tp_comm_overlap=False, moe_flex_dispatcher_backend="deepep"),
        ),
        ddp=dict(
            **dict(use_distributed_optimizer=True, num_distributed_optimizer_instances=1),
            **dict(reduce_scatter_with_fp32_accumulation=False, use_megatron_fsdp=False),
        ),
        optimizer=dict(use_distributed_optimizer=True, optimizer="adam"),
        train=dict(train_iters=10, micro_batch_size=2, global_batch_size=4),
        validation=dict(skip_train=False),
        checkpoint=dict(save=None, load=None, ckpt_format="torch_dist"),
        rerun_state_machine=dict(rerun_mode="disabled"),
        dist=dict(use_decentralized_pg=False, use_torch_fsdp2=False, use_megatron_fsdp=False),
        rng=dict(te_rng_tracker=False),
        logger=dict(log_interval=1),
    )
    for name, value in changes.items():
        part, _, field = name.partition("__")
        parts[part][field] = value
    cfg = SimpleNamespace(**{name: SimpleNamespace(**fields) for name, fields in parts.items()})
    cfg.data_parallel_size = 1
    cfg.comm_overlap = None
    hooks = ([], [])
    if model_config:
        cfg.model = SimpleNamespace(
            transformer=cfg.model, pre_wrap_hooks=hooks[0], post_wrap_hooks=hooks[1]
        )
    else:
        cfg.model.register_pre_wrap_hook = hooks[0].append
        cfg.model.register_post_wrap_hook = hooks[1].append
    cfg.hooks = hooks
    return cfg


@pytest.mark.parametrize("model_config", [False, True], ids=["provider", "ModelConfig"])
def test_hooks_are_registered_and_settings_read(model_config: bool) -> None:
    cfg = container(model_config)
    callback = bridge.attach(cfg, tp=("int8", "int6"), dp="sdp4bit", min_mb=0, start_iteration=2)
    assert [len(hooks) for hooks in cfg.hooks] == [1, 1]
    config, *_ = bridge.check(cfg, callback.config)
    assert (config.tensor_parallel.compression, config.tensor_parallel.backward) == ("int8", "int6")
    assert config.data_parallel.weights.startswith("sdp4bit"), (
        "the distributed optimizer has masters"
    )
    assert config.start_iteration == 2 and config.data_parallel.min_bytes == 0


def test_a_field_of_several_parts_is_set_where_one_sets_it() -> None:
    settings, names = bridge.megatron_settings(
        container(dist__use_megatron_fsdp=True, model__num_moe_experts=8)
    )
    assert settings.use_megatron_fsdp and settings.num_experts == 8
    assert settings.expert_tensor_parallel_size == 2, "as Megatron's arguments"
    assert names["num_experts"] == "cfg.model.num_moe_experts"
    assert names["use_megatron_fsdp"] == "cfg.dist.use_megatron_fsdp"


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        (dict(tp="int9"), {}, r"^tp: .*int9"),
        (dict(tp=("int8", "int9")), {}, r"^tp\[1\]"),
        (dict(min_mb=1.0), {}, "^min_mb given, but nothing uses it; add tp"),
        (dict(dp="tagc"), {}, "^dp tagc: its memory of gradients would be lost on a resume"),
        (
            dict(ep="int8"),
            {},
            "^ep given, but the model has no experts; add cfg.model.num_moe_experts",
        ),
        (
            dict(dp="int8"),
            dict(ddp__use_megatron_fsdp=True),
            "^cfg.ddp.use_megatron_fsdp communicates",
        ),
        (
            dict(dp=("none", "int8")),
            dict(ddp__use_distributed_optimizer=False, optimizer__use_distributed_optimizer=False),
            r"^dp\[1\] .* cfg.ddp.use_distributed_optimizer",
        ),
        (dict(tp="int8"), dict(dist__use_decentralized_pg=True), "^cfg.dist.use_decentralized_pg"),
        (dict(tp="int8", start_iteration=10), {}, "^start_iteration 10 is not before the last"),
    ],
)
def test_what_is_refused_names_fields_and_arguments(
    settings: dict, changes: dict, message: str
) -> None:
    cfg = container(**changes)
    with pytest.raises(CompressionConfigError, match=message):
        bridge.check(cfg, bridge.attach(cfg, **settings).config)


def test_userbuffers_are_switched_off_before_they_are_made(capsys) -> None:
    """They are, in the model and where ``pretrain`` sets it from; set later they are refused."""
    cfg = container(model__tp_comm_overlap=True)
    cfg.comm_overlap = SimpleNamespace(tp_comm_overlap=True)
    config = bridge.attach(cfg, tp="int8").config
    assert not cfg.model.tp_comm_overlap and not cfg.comm_overlap.tp_comm_overlap
    assert capsys.readouterr().out.count("switched off") == 1
    cfg.model.tp_comm_overlap = True
    with pytest.raises(CompressionConfigError, match=r"^cfg.model.tp_comm_overlap was set after"):
        bridge.check(cfg, config)


FLEX = dict(
    model__moe_token_dispatcher_type="flex",
    model__moe_flex_dispatcher_backend="hybridep",
    model__num_moe_experts=8,
    model__expert_model_parallel_size=2,
)
"""A container whose tokens the flex dispatcher sends, as most recipes with experts have it."""


@pytest.mark.parametrize("model_config", [False, True], ids=["provider", "ModelConfig"])
def test_alltoall_takes_the_place_of_flex_before_the_model_is_built(model_config, capsys) -> None:
    """Later the container completes itself and refuses flex where its package is missing."""
    cfg = container(model_config, **FLEX)
    callback = bridge.attach(cfg, ep="int8")
    model = getattr(cfg.model, "transformer", cfg.model)
    assert model.moe_token_dispatcher_type == "alltoall"
    line = "cfg.model.moe_token_dispatcher_type flex (hybridep) is switched to alltoall"
    output = capsys.readouterr().out
    assert output.count(line) == 1
    assert "Drop ep to keep flex" in output
    config, settings, _ = bridge.check(cfg, callback.config)
    assert "tokens to experts and back as int8" in config.describe(settings)[0]


def test_flex_stays_where_tokens_are_not_compressed(capsys) -> None:
    cfg = container(**FLEX)
    bridge.attach(cfg, tp="int8")
    assert cfg.model.moe_token_dispatcher_type == "flex"
    assert not capsys.readouterr().out


def test_settings_of_flex_alone_are_refused_by_name() -> None:
    cfg = container(**FLEX, model__moe_expert_rank_capacity_factor=1.5, model__moe_paged_stash=True)
    message = (
        r"^cfg.model.moe_expert_rank_capacity_factor 1.5 works with the flex dispatcher alone, and "
        r"ep sends tokens by alltoall; drop cfg.model.moe_expert_rank_capacity_factor and "
        r"cfg.model.moe_paged_stash, or drop ep$"
    )
    with pytest.raises(CompressionConfigError, match=message):
        bridge.attach(cfg, ep="int8")


def test_of_two_runs_the_one_whose_step_it_is_is_at_work() -> None:
    """Megatron's rerun machine, which both share, has no model in its arguments."""
    callbacks = [bridge.attach(container(), tp="int8") for _ in range(2)]
    for callback in callbacks:
        callback.compression = SimpleNamespace(
            run=object(), iteration_ends=lambda *_: None, training_ends=lambda: None
        )
        callback._host = SimpleNamespace(training_seconds=0.0, current_iteration=lambda: 0)
    context = SimpleNamespace(skipped_iter=False, loss_dict={})
    for callback in (*callbacks, callbacks[0]):
        callback.on_train_step_start(context)
        assert running.current() is callback.compression.run
        callback.on_train_step_end(context)
        assert running.current("nobody") == "nobody"
    # A step that raises has no end; the next one, or the end of training, is as if it had.
    callbacks[0].on_train_step_start(context)
    callbacks[0].on_train_step_start(context)
    callbacks[0].on_train_end(context)
    assert running.current("nobody") == "nobody"


def test_another_container_is_refused_when_training_starts() -> None:
    callback = bridge.attach(container(), tp="int8")
    with pytest.raises(CompressionConfigError, match="give both one object"):
        callback.on_train_start(SimpleNamespace(state=None))


def test_the_log_names_arguments_and_fields() -> None:
    """A setting without effect is named as a script of Megatron-Bridge has it."""
    cfg = container(model__tensor_model_parallel_size=1)
    config, settings, names = bridge.check(cfg, bridge.attach(cfg, tp="int8").config)
    (line,) = [line for line in config.describe(settings, names) if "no effect" in line]
    assert line.startswith("tp has no effect here: cfg.model.tensor_model_parallel_size is 1")
    assert line.endswith("or drop tp") and "--" not in line
