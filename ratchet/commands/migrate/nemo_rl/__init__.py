"""The key tables of NVIDIA NeMo RL, one module for each subject."""
