import torch, sys, collections, types
sys.path.insert(0, "src"); sys.path.insert(0, ".")
try:
    import pytest
except ImportError:
    class M:
        def __getattr__(self, n): return M()
        def __call__(self, *a, **k):
            return a[0] if len(a) == 1 and callable(a[0]) and not k else (lambda f: f)
    sys.modules["pytest"] = M()
try:
    import hypothesis
except ImportError: pass
from tests.operators.test_piecewise import LINEAR, CURVED, problem_of
from lambdahat.operators import hessian, ggn
from lambdahat.operators.piecewise import curved_because
print(torch.__version__, torch.cuda.get_device_name())
bad = 0
for name in [*LINEAR, *CURVED]:
    make, shape, *_ = LINEAR.get(name) or CURVED[name]
    exact = None
    for dtype in (torch.float64, torch.float32):
        try:
            p = problem_of(make, shape, device="cuda", dtype=dtype)
            why = curved_because(p)
        except Exception as e:
            print("EXC", name, dtype, type(e).__name__, str(e)[:150]); bad += 1; continue
        if bool(why) != (name in CURVED): print("WRONG", name, dtype, repr(why)); bad += 1
        if name in LINEAR:
            t = hessian(p).known_trace()
            c = problem_of(make, shape); tc = hessian(c).known_trace()
            if t is None or abs(t - tc) > (1e-9 if dtype == torch.float64 else 5e-3) * abs(tc): print("TRACE", name, dtype, t, tc); bad += 1
print("bad", bad)
