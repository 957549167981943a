"""The recipes of CONTRIBUTING.md: its operator keeps the contract of all operators.

That the blocks run and print what they show is tested with the other pages, in test_docs.py.
"""

from tests.documents import ROOT, blocks


def recipes():
    """What the page defines up to the test class of its operator."""
    namespace = {"__name__": "contributing"}
    for kind, body, _, _ in blocks(ROOT / "CONTRIBUTING.md"):
        if kind == "python":
            exec(compile(body, "CONTRIBUTING.md", "exec"), namespace)
            if "TestLaplacian" in namespace:
                return namespace
    raise AssertionError("CONTRIBUTING.md has no test class of an operator")


class TestOperatorRecipe(recipes()["TestLaplacian"]):
    pass
