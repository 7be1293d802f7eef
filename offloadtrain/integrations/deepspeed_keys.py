"""The keys of DeepSpeed that need no code: who decides "auto", and what has no counterpart."""

from __future__ import annotations

ARGUMENTS: dict[str, tuple[str, str]] = {
    "learning_rate": ("optim", "lr"),
    "adam_epsilon": ("optim", "eps"),
    "weight_decay": ("optim", "weight_decay"),
    "warmup_steps": ("optim", "warmup_steps"),
    "max_grad_norm": ("offload", "clip_norm"),
    "per_device_train_batch_size": ("train", "micro_batch"),
    "gradient_accumulation_steps": ("train", "grad_accum_steps"),
    "max_steps": ("train", "steps"),
    "seed": ("train", "seed"),
}
"""TrainingArguments' name → section and key of a job."""

AUTO: dict[str, tuple[str, ...]] = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "bf16.enabled": ("bf16",),
    "fp16.enabled": ("fp16",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "scheduler.params.total_num_steps": ("max_steps",),
}
"""Key → the arguments that "auto" stands for."""

_SIZES = "buffers are sized by the blocks of the model; device_slots and *_memory_limit bound them"
_ALWAYS = "always so"
_IN_SLOTS = "of weights on the disk a few slots are on the host, and no cache"
_DISK = "state on the disk is read ahead and written behind, several requests at once, as it is"
_LOGGING = "of the run's log, which is always complete (offloadtrain events, tui)"
_ZEROPP = "ZeRO++ is not there"

IGNORED: dict[str, str] = {
    "train_batch_size": "follows from micro_batch, grad_accum_steps and the number of ranks",
    "steps_per_print": _LOGGING,
    "wall_clock_breakdown": _LOGGING,
    "dump_state": _LOGGING,
    "memory_breakdown": _LOGGING,
    "prescale_gradients": "gradients are averaged after their sum; reduction = 'fp32' sums wider",
    "gradient_predivide_factor": "gradients are averaged after their sum",
    "sparse_gradients": "gradients are dense",
    "disable_allgather": _ALWAYS,
    "zero_allow_untested_optimizer": "every optimizer here is made for it",
    "zero_force_ds_cpu_optimizer": "there is one CPU optimizer",
    "gradient_accumulation_dtype": "gradients are summed over microbatches in fp32",
    "data_types.grad_accum_dtype": "gradients are summed over microbatches in fp32",
    "bf16.immediate_grad_update": _ALWAYS,
    "zero_optimization.contiguous_gradients": _ALWAYS,
    "zero_optimization.overlap_comm": _ALWAYS,
    "zero_optimization.reduce_scatter": _ALWAYS,
    "zero_optimization.allgather_partitions": _ALWAYS,
    "zero_optimization.round_robin_gradients": _ALWAYS,
    "zero_optimization.load_from_fp32_weights": _ALWAYS,
    "zero_optimization.elastic_checkpoint": "jobs resume on any number of ranks",
    "zero_optimization.ignore_unused_parameters": _ALWAYS,
    "zero_optimization.legacy_stage1": "of an old DeepSpeed",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _ALWAYS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _ALWAYS,
    "zero_optimization.reduce_bucket_size": _SIZES,
    "zero_optimization.allgather_bucket_size": _SIZES,
    "zero_optimization.sub_group_size": _SIZES,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZES,
    "zero_optimization.stage3_param_persistence_threshold": _SIZES,
    "zero_optimization.stage3_model_persistence_threshold": _SIZES,
    "zero_optimization.stage3_max_live_parameters": _SIZES,
    "zero_optimization.stage3_max_reuse_distance": _SIZES,
    "zero_optimization.memory_efficient_linear": "activation = 'recompute' saves that memory",
    "zero_optimization.offload_optimizer.buffer_count": _DISK,
    "zero_optimization.offload_optimizer.buffer_size": _DISK,
    "zero_optimization.offload_optimizer.fast_init": _DISK,
    "zero_optimization.offload_optimizer.pipeline": _DISK,
    "zero_optimization.offload_optimizer.pipeline_read": _DISK,
    "zero_optimization.offload_optimizer.pipeline_write": _DISK,
    "zero_optimization.offload_param.buffer_count": "device_slots is the number of blocks there",
    "zero_optimization.offload_param.buffer_size": _SIZES,
    "zero_optimization.offload_param.max_in_cpu": _IN_SLOTS,
    "zero_optimization.zero_hpz_partition_size": _ZEROPP,
    "zero_optimization.zero_quantized_weights": _ZEROPP,
    "zero_optimization.zero_quantized_nontrainable_weights": _ZEROPP,
    "zero_optimization.zero_quantized_gradients": _ZEROPP,
    "zero_optimization.mics_shard_size": "shards are over all ranks of a process group",
    "scheduler.params.last_batch_iteration": "a run resumes from its own checkpoint",
}
"""Key → why nothing stands for it."""

SECTIONS: dict[str, str] = {
    "activation_checkpointing": "activation = 'recompute' or 'offload' says all of it",
    "aio": _DISK,
    "amp": "apex's casts are not there",
    "autotuning": "offloadtrain plan chooses: device.placement = 'auto'",
    "checkpoint": "checkpoints are written in the background, verified and resharded as they are",
    "comms_logger": _LOGGING,
    "compression_training": "not there",
    "csv_monitor": _LOGGING,
    "curriculum_learning": "not there",
    "data_efficiency": "not there",
    "elasticity": "jobs resume on any number of ranks",
    "eigenvalue": "not there",
    "flops_profiler": _LOGGING,
    "monitor_config": _LOGGING,
    "progressive_layer_drop": "not there",
    "sparse_attention": "of the model",
    "tensorboard": _LOGGING,
    "tensor_parallel": "not there",
    "wandb": _LOGGING,
    "zenflow": "not there; update = 'delayed' overlaps with one step of staleness",
}
"""Section → why nothing stands for its keys."""
