"""Terms of routers: what a learner measured of each sequence, as losses and as measures."""

import torch

from ratchet.algorithms.losses.expert_balance import router_balance, router_terms, router_z
from ratchet.protocols import Outputs

# Of each sequence: balance, z, entropy, largest load, share of choices that replay changed.
MEASURED = [[1.5, 4.0, 0.5, 2.0, 0.25], [1.0, 9.0, 0.75, 1.0, 0.0], [2.0, 1.0, 0.0, 4.0, 1.0]]


def outputs():
    return Outputs(sequence_sum=lambda x: x, routers=torch.tensor(MEASURED, requires_grad=True))


def test_balance_comes_with_measures_that_carry_no_gradient():
    x_S, metrics = router_balance(outputs(), None)
    assert x_S.tolist() == [1.5, 1.0, 2.0]
    assert x_S.requires_grad
    assert {name: column_S.tolist() for name, column_S in metrics.items()} == {
        "balance": [1.5, 1.0, 2.0],
        "entropy": [0.5, 0.75, 0.0],
        "max_load": [2.0, 1.0, 4.0],
        "rerouted": [0.25, 0.0, 1.0],
    }
    assert not any(column_S.requires_grad for column_S in metrics.values())


def test_z_is_measured_without_gradient():
    x_S, metrics = router_z(outputs(), None)
    assert x_S.tolist() == metrics["z"].tolist() == [4.0, 9.0, 1.0]
    assert x_S.requires_grad
    assert not metrics["z"].requires_grad


def test_a_coefficient_of_zero_measures_balance_and_leaves_z_out():
    def found(**coefs):
        return [(term.name, term.coef, term.level) for term in router_terms(**coefs)]

    assert found(balance_coef=0.0, z_coef=0.0) == [("router", 0.0, "sequence")]
    assert found(balance_coef=0.01, z_coef=0.5) == [
        ("router", 0.01, "sequence"),
        ("router_z", 0.5, "sequence"),
    ]
