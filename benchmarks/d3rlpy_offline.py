"""d3rlpy's TD3+BC and IQL on `dummy_data.py`: its buffer draws, its learner updates."""

import d3rlpy
import dummy_data
import numpy as np
import torch
import worker

LEARNERS = {"td3_bc": d3rlpy.algos.TD3PlusBCConfig, "iql": d3rlpy.algos.IQLConfig}
BLOCK = 50


def run(config, tick):
    """Updates for ever; one tick per block."""
    torch.set_num_threads(config["torch_threads"])
    obs, action, reward = dummy_data.arrays(config["rows"])
    timeouts = np.zeros(len(obs), np.float32)
    timeouts[dummy_data.EPISODE - 1 :: dummy_data.EPISODE] = 1
    dataset = d3rlpy.dataset.MDPDataset(
        obs, action, reward, np.zeros_like(timeouts), timeouts=timeouts
    )
    s = config["settings"]
    encoder = d3rlpy.models.VectorEncoderFactory(hidden_units=list(s["hidden"]))
    settings = {
        "batch_size": s["batch_size"],
        "actor_learning_rate": s["learning_rate"],
        "critic_learning_rate": s["learning_rate"],
        "actor_encoder_factory": encoder,
        "critic_encoder_factory": encoder,
        "compile_graph": config["compile"] == "on",
    }
    learner = LEARNERS[config["algo"]](**settings).create(device=False)
    learner.build_with_dataset(dataset)
    while True:
        for _ in range(BLOCK):
            learner.update(dataset.sample_transition_batch(s["batch_size"]))
        tick(BLOCK)


if __name__ == "__main__":
    worker.serve(run, ("d3rlpy", "torch"))
