"""What train.py and eval.py share: data, evaluation, checkpoints, and what ColossalAI lacks on a CPU."""
