"""Problems: exact solutions that solve their equations, boundary conditions that hold, and files with errors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fusedops.slots import SLOTS
from fusedops.slots.laplacian import Points, autograd_jet
from models.pinn import data, figures, problems
from models.pinn.model import PINN, HardBoundary, PINNOps
from models.pinn.problem import Problem

NAMES = ("allen_cahn", "heat", "helmholtz", "poisson", "screened_poisson")

ONE_FILE = '''
from math import pi

import torch
from torch import Tensor

from models.pinn.problem import Problem


class Plate(Problem):
    """Poisson's equation in two dimensions on a plate of sides 2 and 1."""

    equation = "lap u = -(pi^2 / 4 + pi^2) u"
    source = "a test"
    spatial = 2
    lower = (-1.0, 0.0)
    upper = (1.0, 1.0)

    def exact(self, x: Tensor) -> Tensor:
        return torch.cos(pi * x[:, 0] / 2) * torch.sin(pi * x[:, 1])

    def residual(self, u: Tensor, du: Tensor, lap: Tensor, x: Tensor) -> Tensor:
        return lap + pi**2 * 1.25 * self.exact(x)
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose files are problems too."""
    monkeypatch.setattr(problems, "__path__", [*problems.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)  # which makes importlib look for new files
    return tmp_path


def random_points(problem: Problem, count: int = 501) -> torch.Tensor:
    return data.interior(problem, "uniform", count, seed=int(torch.randint(0, 2**31, ())), step=0)


def test_there_are_these_problems() -> None:
    assert set(NAMES) <= set(problems.names())


@pytest.mark.parametrize("name", NAMES)
def test_the_exact_solution_solves_the_equation_and_another_function_does_not(name: str) -> None:
    problem = problems.load(name)
    x = random_points(problem)
    u, du, lap = autograd_jet(problem.exact, x, problem.spatial, False)
    scale = lap.abs().max()
    assert problem.residual(u, du, lap, x).abs().max() < 1e-12 * scale
    v, dv, lap_v = autograd_jet(lambda x: problem.exact(x) * (1 + 0.01 * x[:, 0]), x, problem.spatial, False)
    assert problem.residual(v, dv, lap_v, x).abs().max() > 1e-5 * scale


@pytest.mark.parametrize("name", NAMES)
def test_offset_and_factor_meet_the_boundary_conditions_and_leave_the_inside_free(name: str) -> None:
    problem = problems.load(name)
    assert len(problem.faces) == 2 * problem.spatial + (problem.dimensions - problem.spatial)
    for face in problem.faces:
        x = random_points(problem)
        x[:, face.axis] = face.value
        torch.testing.assert_close(problem.offset(x), problem.exact(x), rtol=0, atol=1e-14)
        assert problem.factor(x).abs().max() == 0
    assert problem.factor(random_points(problem)).min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_factors_closed_derivatives_are_those_of_autograd(name: str) -> None:
    problem = problems.load(name)
    x = random_points(problem)
    for ours, expected in zip(
        problem.factor_jet(x), autograd_jet(problem.factor, x, problem.spatial, False), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


def test_a_problem_is_one_file(folder: Path) -> None:
    (folder / "plate.py").write_text(ONE_FILE)
    assert "plate" in problems.names()
    problem = problems.load("plate")
    assert (problem.dimensions, problem.coordinates) == (2, ("x", "y"))
    assert [face.name for face in problem.faces] == ["x=-1", "x=1", "y=0", "y=1"]
    middle = torch.tensor([[0.0, 0.5], [1.0, 0.25]], dtype=torch.float64)
    assert problem.factor(middle).tolist() == [1.0, 0.0]


def test_a_face_may_be_left_out(folder: Path) -> None:
    text = ONE_FILE.replace(
        "    def exact", "    @property\n    def faces(self):\n        return super().faces[1:]\n\n    def exact"
    )
    (folder / "open_plate.py").write_text(text)
    problem = problems.load("open_plate")
    points = torch.tensor([[-1.0, 0.5], [0.0, 0.5], [1.0, 0.5]], dtype=torch.float64)
    assert problem.factor(points).tolist() == [1.0, 0.5, 0.0]
    x = random_points(problem)
    for ours, expected in zip(problem.factor_jet(x), autograd_jet(problem.factor, x, 2, False), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("solution", ["x[:, 0] + 2 * x[:, 1]", "torch.full_like(x[:, 0], 2.0)"])
def test_a_solution_without_second_derivatives_is_one(folder: Path, solution: str) -> None:
    """Harmonic: linear and constant ones, whose derivatives autograd has no graph of."""
    text = ONE_FILE.replace("return torch.cos(pi * x[:, 0] / 2) * torch.sin(pi * x[:, 1])", f"return {solution}")
    text = text.replace("return lap + pi**2 * 1.25 * self.exact(x)", "return lap")
    name = f"harmonic_{len(solution)}"
    (folder / f"{name}.py").write_text(
        f"{text}\n    def offset(self, x: Tensor) -> Tensor:\n        return {solution}\n"
    )
    problem = problems.load(name)
    x = random_points(problem)
    a, _ = HardBoundary(problem).jets(x, 2)
    torch.testing.assert_close(a.value, problem.exact(x))
    assert not a.laplacian.any()


def test_a_problem_may_have_one_coordinate(folder: Path) -> None:
    """A rod: its factor's derivatives, and its picture, which is two curves."""
    text = (
        ONE_FILE.replace("spatial = 2", "spatial = 1").replace("(-1.0, 0.0)", "(-1.0,)").replace("(1.0, 1.0)", "(1.0,)")
    )
    text = text.replace(" * torch.sin(pi * x[:, 1])", "").replace("pi**2 * 1.25", "pi**2 / 4")
    (folder / "rod.py").write_text(text)
    problem = problems.load("rod")
    x = random_points(problem)
    for ours, expected in zip(problem.factor_jet(x), autograd_jet(problem.factor, x, 1, False), strict=True):
        torch.testing.assert_close(ours, expected)
    ops = PINNOps(SLOTS["laplacian"].implementation("fused").function)
    model = PINN(problem, 4, 1, "tanh", True, ops)
    with torch.no_grad():
        jet = model.jet(Points(x.float()))
    torch.testing.assert_close(jet.value, model(x.float()).detach())
    both, difference = figures.solution(problem, model).axes
    assert [len(axes.lines) for axes in (both, difference)] == [2, 1]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("syntax", "return lap +", "return lap +++ (", "SyntaxError"),
        ("missing_name", "from math import pi", "", "NameError: name 'pi' is not defined"),
        ("no_class", "(Problem)", "", "defines 0 subclasses of Problem; one is needed"),
        ("abstract", "def exact", "def solution", "Can't instantiate abstract class Plate"),
        ("no_source", '    source = "a test"\n', "", "source is not given"),
        ("short_box", "lower = (-1.0, 0.0)", "lower = (-1.0,)", "lower has 1 coordinates, upper 2"),
        ("flat_box", "lower = (-1.0, 0.0)", "lower = (-1.0, 1.0)", "is not below upper"),
        ("line", "spatial = 2", "spatial = 4", "spatial=4 of 2 coordinates"),
        ("shape", "return lap +", "return lap[:, None] +", "residual of 64 points has shape"),
        ("forcing", "1.25", "1.2", "the exact solution does not solve the equation: its residual is up to"),
        ("nan", "1.25", "float('nan')", "its residual is up to nan"),
        ("detached", "return torch.cos(pi * x", "return torch.cos(pi * x.detach()", "does not solve the equation"),
        ("numbers", "return torch.cos", "x = x.detach()\n        return torch.cos", "exact has no gradient"),
        ("zero", "return torch.cos", "return 0 * torch.cos", "the exact solution is zero everywhere"),
        ("no_face", "    spatial = 2\n", "    spatial = 2\n    faces = ()\n", "faces is empty"),
    ],
)
def test_an_error_in_a_file_is_reported_with_the_file(
    folder: Path, name: str, old: str, new: str, message: str
) -> None:
    path = folder / f"faulty_{name}.py"
    assert old in ONE_FILE
    path.write_text(ONE_FILE.replace(old, new))
    with pytest.raises(ValueError) as caught:
        problems.load(path.stem)
    assert f"problem={path.stem}: {path}: " in str(caught.value)
    assert message in str(caught.value)


def test_boundary_values_that_the_transform_misses_are_reported_with_the_face(folder: Path) -> None:
    (folder / "raised.py").write_text(ONE_FILE.replace("return torch.cos", "return 1 + torch.cos").replace(
        "self.exact(x)", "(self.exact(x) - 1)"
    ))  # fmt: skip
    with pytest.raises(ValueError, match=r"raised.py: offset differs from the exact solution on the boundary x=-1"):
        problems.load("raised")
