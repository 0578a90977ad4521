"""Points: where they lie, and that they depend on nothing but their arguments."""

from __future__ import annotations

import pytest
import torch

from models.pinn import data, problems

POISSON, HEAT = problems.load("poisson"), problems.load("heat")


@pytest.mark.parametrize("sampling", ["sobol", "uniform"])
@pytest.mark.parametrize("problem", [POISSON, HEAT])
def test_scattered_points_are_a_pure_function_of_seed_step_and_rank(sampling: str, problem) -> None:
    points = data.interior(problem, sampling, 333, seed=5, step=7, rank=1)
    assert points.shape == (333, problem.dimensions) and points.dtype == torch.float64
    assert points.min() >= 0 and points.max() <= 1 and len(points.unique(dim=0)) == 333
    assert torch.equal(points, data.interior(problem, sampling, 333, seed=5, step=7, rank=1))
    for seed, step, rank in ((6, 7, 1), (5, 8, 1), (5, 7, 0)):
        assert not torch.equal(points, data.interior(problem, sampling, 333, seed, step, rank))


def test_sobol_points_are_more_even_than_random_ones() -> None:
    def unevenness(sampling: str, seed: int) -> float:
        columns = data.interior(POISSON, sampling, 512, seed, step=3).sort(dim=0).values
        expected = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
        return float((columns - expected[:, None]).abs().max())

    for seed in range(5):
        assert unevenness("sobol", seed) <= 2 / 512 < unevenness("uniform", seed)


@pytest.mark.parametrize("problem", [POISSON, HEAT])
def test_a_grid_has_the_middles_of_equal_cells(problem) -> None:
    d = problem.dimensions
    grid = data.grid(problem, 5**d + 3, order=4)
    assert (grid.shape, grid.order) == ((5,) * d, 4)
    assert grid.spacing == pytest.approx((0.2,) * d) and grid.origin == pytest.approx((0.1,) * d)
    nodes = grid.nodes(problem.spatial, torch.device("cpu"), torch.float64)
    assert nodes.shape == (5**d, d)
    assert torch.allclose(nodes.mean(0), torch.tensor(0.5, dtype=torch.float64))


def test_a_grid_of_two_nodes_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train.batch_size=10: a grid of 3 axes .* at least 27 points"):
        data.grid(POISSON, 10, order=2)


def test_a_boundarys_points_are_shared_by_its_faces() -> None:
    points = data.boundary(HEAT, 38, seed=1, step=2)
    assert points.shape == (38, 4)
    on_face = torch.stack([points[:, face.axis] == face.value for face in HEAT.faces], 1)
    assert on_face.sum(0).tolist() == [6, 6, 6, 5, 5, 5, 5]
    assert torch.equal(points, data.boundary(HEAT, 38, seed=1, step=2))
    assert not torch.equal(points, data.boundary(HEAT, 38, seed=1, step=3))


@pytest.mark.parametrize(("count", "face"), [(0, "x=0"), (4, "z=0"), (6, "t=0")])
def test_a_face_without_points_is_named(count: int, face: str) -> None:
    with pytest.raises(ValueError, match=f"boundary_points={count}: no point lies on the boundary {face}; at least 7"):
        data.boundary(HEAT, count, seed=0, step=0)


def test_the_held_out_grid_is_dense_in_space_and_a_third_as_dense_in_time() -> None:
    assert data.held_out(POISSON, 10).shape == (1000, 3)
    points = data.held_out(HEAT, 10)
    assert points.shape == (3000, 4)
    assert [len(points[:, axis].unique()) for axis in range(4)] == [10, 10, 10, 3]


@pytest.mark.parametrize("per_axis", [3, 8, 9, 12])
def test_no_node_of_the_training_grid_is_held_out(per_axis: int) -> None:
    """Of 9^3 nodes, the middles of thirds of 27 points, all would be."""
    for problem in (POISSON, HEAT):
        grid = data.grid(problem, per_axis**problem.dimensions, 2)
        nodes = grid.nodes(problem.spatial, torch.device("cpu"), torch.float64)
        for points in (9, 12, 27):
            held_out = data.held_out(problem, points, grid)
            assert len(held_out) >= len(data.held_out(problem, points))
            assert torch.cdist(nodes[:, :1].unique(dim=0), held_out[:, :1].unique(dim=0)).min() > 1e-3


def test_the_plane_holds_the_other_coordinates_half_way() -> None:
    points = data.plane(HEAT, 5)
    assert points.shape == (5, 5, 4)
    assert points[..., 2:].eq(0.5).all()
    assert points[:, 0, 0].tolist() == points[0, :, 1].tolist() == [0, 0.25, 0.5, 0.75, 1]
