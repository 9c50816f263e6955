"""What tests and benchmarks share: the table of cases, the gradient check, the comparison by budget."""

from npattn.testing.cases import Case as Case
from npattn.testing.cases import case as case
from npattn.testing.cases import cases as cases
from npattn.testing.compare import assert_within_budget as assert_within_budget
from npattn.testing.gradcheck import check_vjp as check_vjp

__all__ = ["Case", "assert_within_budget", "case", "cases", "check_vjp"]
