"""Train on environments of Atropos: their code plays a whole group, and the policy answers it."""
