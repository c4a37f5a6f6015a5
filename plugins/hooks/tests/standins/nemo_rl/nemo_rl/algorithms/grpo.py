"""Has the functions of NeMo-RL's module of this name, and the order in which they ask policy and engines."""

from loops import done

from nemo_rl.models.generation.interfaces import GenerationInterface
from nemo_rl.models.policy.interfaces import ColocatablePolicyInterface


def setup(master_config, tokenizer, dataset, val_dataset, processor=None):
    done("models.build")
    return ColocatablePolicyInterface(), GenerationInterface()


def refit_policy_generation(policy, policy_generation, colocated_inference, _refit_buffer_size_gb=None):
    if not colocated_inference:
        policy.broadcast_weights_for_collective()
        return
    policy.offload_before_refit()
    policy_generation.prepare_for_generation(tags=["weights"])
    done("engines.load_weights")
    policy.offload_after_refit()
    policy_generation.prepare_for_generation(tags=["kv_cache"])


def grpo_train(policy, policy_generation, wrapped_dataloader, checkpointer):
    for _ in wrapped_dataloader:
        refit_policy_generation(policy, policy_generation, True)
        done("engines.generate")
        policy_generation.finish_generation()
        policy.prepare_for_lp_inference()
        policy.get_logprobs()
        policy.prepare_for_training()
        policy.train()
        if checkpointer:
            policy.save_checkpoint()
    refit_policy_generation(policy, policy_generation, True)
    policy_generation.finish_generation()
    policy_generation.prepare_for_generation()
    done("engines.validate")
    policy_generation.finish_generation()


def async_grpo_train(policy, policy_generation, wrapped_dataloader, checkpointer):
    refit_policy_generation(policy, policy_generation, False)
    policy_generation.prepare_for_generation()
    done("engines.validate")
    policy_generation.finish_generation()
    for _ in wrapped_dataloader:
        done("engines.generate")
        policy.prepare_for_lp_inference()
        policy.get_logprobs()
        policy.prepare_for_training()
        policy.train()
        refit_policy_generation(policy, policy_generation, False)
        policy_generation.prepare_for_generation()
        done("engines.validate")
        policy_generation.finish_generation()
        if checkpointer:
            policy.save_checkpoint()
