"""What the tests of PPO and GenAC are built from."""

from replay import MAX_COMPLETION_LENGTH, TOKENIZER, addition_dataset, digit_reward, stored_label
from seeds import shifted


SETTINGS = {
    "use_cpu": True,
    "bf16": False,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": MAX_COMPLETION_LENGTH,
    "learning_rate": 0.05,
    "critic_learning_rate": 0.05,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "max_steps": 2,
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": shifted(42),
}

ADAM = {
    "optim": "adamw_torch",
    "learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "max_grad_norm": 1.0,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "max_steps": 4,
}


def build(
    trainer_class, output_dir, model_path, *, replay=None, callbacks=(), peft_config=None, reward=None, **settings
):
    return trainer_class(
        model_path,
        reward or (digit_reward if replay is None else stored_label),
        args=trainer_class._config_class(str(output_dir), **(SETTINGS | settings)),
        train_dataset=addition_dataset(),
        processing_class=TOKENIZER,
        rollout_func=replay,
        callbacks=list(callbacks),
        peft_config=peft_config,
    )
