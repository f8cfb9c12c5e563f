"""Functions of one environment with every primitive that has a rule, and what they are called with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import linalg

E = 5
lax = jax.lax


def floats(shape, seed=0, scale=2.0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=(E, *shape)) * scale))


def integers(shape, low, high, seed=0, dtype=jnp.int32):
    return jax.device_put(np.random.default_rng(seed).integers(low, high, size=(E, *shape)).astype(dtype))


def booleans(shape, seed=0):
    return jax.device_put(np.random.default_rng(seed).random((E, *shape)) < 0.5)


def keys(*shape, seed=0):
    return jax.random.split(jax.random.key(seed), (E, *shape))


SPECIAL = jnp.asarray(
    [[0.0, -0.0, 1.0, np.nan], [np.inf, -np.inf, -1.0, 0.5]] + [[2.5, -2.5, 1e30, 1e-30]] * 3, jnp.float32
)


def smooth(x):
    inside = jnp.clip(x, -0.9, 0.9)
    above = jnp.abs(x) + 1.0
    one = [
        f(x) for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.expm1, jnp.arctan, jnp.arcsinh, lax.erf, lax.erfc)
    ]
    two = [f(inside) for f in (jnp.arcsin, jnp.arccos, jnp.arctanh, jnp.tan, lax.erf_inv, jnp.sinh, jnp.cosh)]
    three = [f(above) for f in (jnp.log, jnp.log1p, jnp.sqrt, lax.rsqrt, jnp.cbrt, jnp.arccosh, jnp.log2)]
    four = [
        jnp.exp2(x),
        jax.nn.sigmoid(x),
        jnp.arctan2(x, above),
        above**x,
        x**3,
        x**-2,
        jnp.square(x),
        lax.pow(above, jnp.int32(2)),
    ]
    return one + two + three + four


def edges(x):
    y = jnp.flip(x)
    return [
        jnp.abs(x),
        -x,
        jnp.sign(x),
        jnp.floor(x),
        jnp.ceil(x),
        jnp.round(x),
        lax.round(x),
        jnp.isfinite(x),
        jnp.isnan(x),
        jnp.maximum(x, y),
        jnp.minimum(x, y),
        x / y,
        x * y,
        x - y,
        lax.rem(x, jnp.float32(0.7)),
        jnp.nextafter(x, y),
        jnp.clip(x, -1.0, 1.0),
        x == y,
        x != y,
        x < y,
        x <= y,
        x > y,
        x >= y,
        jnp.nan_to_num(x),
        jnp.signbit(x),
        x + 0.0,
        0.0 + x,
        x * 1.0,
    ]


def whole_numbers(x, y):
    unsigned = x.astype(jnp.uint32)
    return [
        x + y,
        x - y,
        x * y,
        x // y,
        x % y,
        lax.div(x, y),
        lax.rem(x, y),
        -x,
        jnp.abs(x),
        jnp.sign(x),
        x & y,
        x | y,
        x ^ y,
        ~x,
        x << 3,
        x >> 2,
        lax.shift_right_logical(x, jnp.int32(5)),
        unsigned >> 3,
        unsigned // jnp.uint32(3),
        lax.population_count(unsigned),
        lax.clz(x),
        jnp.maximum(x, y),
        x**2,
        jnp.bitwise_count(x),
        lax.integer_pow(x, 5),
        (x > 0) & (y > 0),
        (x > 0) ^ (y > 0),
        ~(x > 0),
        lax.clamp(jnp.int32(-3), x, jnp.int32(4)),
        x.astype(jnp.int8) + y.astype(jnp.int8),
        x.astype(jnp.uint8) * y.astype(jnp.uint8),
        x.astype(jnp.int16) >> jnp.int16(2),
    ]


def conversions(x, n, b):
    return [
        x.astype(jnp.int32),
        x.astype(bool),
        n.astype(jnp.float32),
        n.astype(bool),
        b.astype(jnp.int32),
        b.astype(jnp.float32),
        n.astype(jnp.uint8),
        n.astype(jnp.int8),
        n.astype(jnp.uint32).astype(jnp.float32),
        lax.bitcast_convert_type(x, jnp.int32),
        lax.bitcast_convert_type(n, jnp.float32) > 0,
        (b.astype(jnp.int32) > 0) | (b.astype(jnp.int32) == 0),
        b.astype(jnp.int32).astype(jnp.float32),
    ]


def short_conversions(x):
    return [x.astype(jnp.bfloat16), x.astype(jnp.float16) + jnp.float16(1), lax.reduce_precision(x, 8, 7)]


def choices(x, n, b):
    which = n % 3
    return [
        jnp.where(b, x, 0.0),
        jnp.where(b, 1.0, x),
        lax.select_n(which, x, x * 2, x * 3),
        jnp.select([x > 1.0, x > 0.0], [x, -x], 0.5),
        jnp.where(b[0], x, jnp.flip(x)),
        jnp.where(b, True, False),
        jnp.piecewise(x, [x < 0, x >= 0], [lambda v: -v, lambda v: v * 2]),
    ]


def shapes(x, y):
    m = x.reshape(3, 4)
    return [
        m.T,
        m[1],
        m[:, ::2],
        m[::-1],
        jnp.flip(m, 1),
        m[1:3, 1:],
        m[None],
        jnp.squeeze(m[:1], 0),
        jnp.concatenate([m, y[None]]),
        jnp.stack([y, y * 2], axis=1),
        jnp.pad(m, ((1, 0), (2, 1)), constant_values=7.0),
        lax.pad(m, jnp.float32(0), ((-1, 2, 1), (1, -2, 0))),
        jnp.tile(y, 2),
        jnp.repeat(y, 2),
        jnp.roll(y, 1),
        jnp.broadcast_to(y[:, None], (4, 3)),
        jnp.arange(4, dtype=jnp.float32) * y,
        *jnp.split(m, 2, axis=1),
        jnp.eye(4) * y[None],
        jnp.moveaxis(m[None], 0, 2),
        jnp.outer(y, y),
        jnp.tril(m),
        jnp.diff(y),
        *jnp.unstack(m),
        jnp.meshgrid(y, y)[0],
        jnp.zeros((0,)),
        jnp.rot90(m),
        jnp.vstack([m, m]),
        jnp.einsum("ij->ji", m),
    ]


def reads(x, i, j, k):
    m = x.reshape(3, 4)
    return [
        x[i],
        m[i],
        m[i, j],
        m[:, j],
        lax.dynamic_slice(x, (k,), (5,)),
        lax.dynamic_slice(m, (k, j), (2, 3)),
        x[jnp.stack([i, j, k])],
        x.at[k].get(mode="fill", fill_value=9.0),
        x.at[k].get(mode="clip"),
        x.at[jnp.stack([k, i])].get(mode="fill"),
        jnp.take(x, k),
        jnp.take_along_axis(m, jnp.stack([i, i, j])[:, None], axis=1),
        m[jnp.array([2, 0]), jnp.array([1, 3])],
        m[jnp.array([2, 0])],
        lax.dynamic_index_in_dim(m, i, keepdims=False),
        x[i.astype(jnp.uint8)],
        jnp.choose(i % 2, [x[:2], x[2:4]], mode="clip"),
        m[jnp.arange(3), j],
    ]


def writes(x, i, j, k):
    m = x.reshape(3, 4)
    two = jnp.stack([i, j])
    return [
        x.at[i].set(5.0),
        x.at[2].set(x[0]),
        m.at[i, j].set(1.0),
        m.at[i].set(x[:4]),
        m.at[:, j].add(2.0),
        x.at[two].add(1.5),
        x.at[two].mul(2.0),
        x.at[two].min(0.0),
        x.at[two].max(jnp.array([0.5, -0.5])),
        x.at[k].set(3.0),
        x.at[k].set(3.0, mode="clip"),
        lax.dynamic_update_slice(m, x[:4].reshape(2, 2), (i, k)),
        m.at[0, 1:3].set(0.0),
        x.at[::3].add(1.0),
        jnp.zeros(4, jnp.int32).at[j].add(1),
        m.at[jnp.array([0, 2]), two].set(x[:2]),
        x.at[two].subtract(1.0),
        lax.dynamic_update_index_in_dim(m, x[:4], i, 0),
    ]


TABLE = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)


def tables(shared, i, j, k):
    known = jnp.asarray(TABLE)
    return [
        known[i],
        known[i, j % 3],
        shared[i],
        shared[k],
        shared[jnp.stack([i, j])],
        jnp.asarray(TABLE[:4])[j],
        shared[:4][j],
        jnp.take(known, k, axis=0, mode="fill"),
        lax.dynamic_slice(shared, (k, j), (4, 2)),
        shared[2] * j.astype(jnp.float32),
    ]


def totals(x, n, b):
    m = x.reshape(3, 4)
    return [
        m.sum(),
        m.sum(0),
        m.sum(1),
        m.max(),
        m.min(1),
        m.prod(0),
        m.mean(),
        m.std(1),
        jnp.argmax(m, 1),
        jnp.argmin(m),
        jnp.any(b),
        jnp.all(b),
        n.sum(),
        n.max(),
        jnp.cumsum(x),
        jnp.cumprod(x[:4]),
        lax.cummax(x),
        lax.cummin(x, reverse=True),
        jnp.cumsum(m, axis=0),
        jnp.ptp(x),
        lax.cumlogsumexp(x),
        jax.nn.logsumexp(x),
        jax.nn.softmax(m),
        lax.reduce_xor(n, (0,)),
        jnp.linalg.norm(x),
        jnp.count_nonzero(b),
        lax.reduce(x, jnp.float32(0), lambda a, c: a * 0.5 + c, (0,)),
        jnp.sum(x[:0]),
        jnp.var(m, axis=0),
        jnp.ptp(m, axis=0),
    ]


def not_numbers(x):
    return [
        jnp.argmax(x),
        jnp.argmin(x),
        jnp.sort(x),
        jnp.argsort(x),
        lax.top_k(x, 2),
        jnp.argsort(x, descending=True),
        jnp.max(x),
        jnp.min(x),
        jnp.nanmax(x),
        jnp.nansum(x),
    ]


def sorts(x, n):
    wide = jnp.concatenate([n, n - 2, n[:1]])
    return [
        jnp.argsort(x),
        jnp.argsort(n % 3, stable=True),
        lax.sort((n, x, jnp.arange(6)), num_keys=2),
        lax.top_k(x, 4),
        jnp.argsort(wide),
        jnp.sort(x.reshape(2, 3), axis=0),
        jnp.flip(jnp.sort(n)),
        jnp.searchsorted(jnp.sort(x), x[:2]),
        jnp.median(x),
        jnp.sort(n > 2),
    ]


def products(weights, x, y):
    m = x.reshape(3, 4)
    return [
        m @ y,
        y @ m.T,
        jnp.dot(y, y),
        m @ m.T,
        jnp.einsum("ij,kj->ik", m, m),
        y @ weights["narrow"],
        y @ weights["wide"],
        m @ weights["wide"],
        weights["wide"].T @ y,
        weights["turned"] @ y,
        jnp.einsum("aj,ajk->ak", m, weights["batched"]),
        jnp.tensordot(m, weights["both"], 2),
        (x.astype(jnp.int32)[:4]) @ jnp.arange(8, dtype=jnp.int32).reshape(4, 2),
        jnp.vdot(x, x),
        jnp.cross(y[:3], y[1:]),
        x @ weights["long"],
        jnp.einsum("i,ihk->hk", y, weights["heads"]),
        weights["turned"] @ m.T,
        jnp.linalg.matrix_power(m[:, :3], 2),
    ]


def weights(seed=3):
    shapes = {
        "narrow": (4, 2),
        "wide": (4, 20),
        "turned": (20, 4),
        "batched": (3, 4, 12),
        "both": (3, 4, 10),
        "long": (12, 3),
        "heads": (4, 3, 10),
    }
    rng = np.random.default_rng(seed)
    return {name: jax.device_put(np.float32(rng.normal(size=shape))) for name, shape in shapes.items()}


def short_floats(weights, h, x):
    brief = {name: weight.astype(jnp.bfloat16) for name, weight in weights.items()}
    own, few = h.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    wide = jax.lax.dot(own, brief["square"], preferred_element_type=jnp.float32)
    total = jax.lax.dot(own, own, preferred_element_type=jnp.float32)
    narrow = jax.lax.dot(own, brief["narrow"], preferred_element_type=jnp.float32)
    return [wide, total, narrow, few * few, jax.lax.dot(few, few, preferred_element_type=jnp.float32), few.sum()]


def deep_rows(weights, h):
    """A row that is read twice in each of many operations, cut in the end."""
    r = h @ weights["gates"]
    for _ in range(25):
        r = jnp.tanh(r) * 0.5 + r * 0.5
    return [r[:40] - r[80:], jnp.concatenate([r[:50], h]) @ weights["cut"]]


def rows(weights, h, x, b):
    """A layer, a gated unit, a layer norm, attention of rows: what stays in rows."""
    r = h @ weights["square"]
    a, z, n = jnp.split(h @ weights["gates"] + weights["bias"], 3)
    hidden = jnp.tanh(n + jax.nn.sigmoid(a) * h) * jax.nn.sigmoid(z)
    normal = (r - r.mean()) / jnp.sqrt(jnp.var(r) + 1e-5)
    both = jnp.concatenate([h, x, r])
    gelu, relu = jax.nn.gelu(r), jax.nn.relu(r)
    stacked = jnp.stack([h, r])
    return {
        "hidden": jnp.where(b, hidden, jnp.zeros_like(hidden)),
        "normal": normal,
        "narrow": relu @ weights["narrow"],
        "dot": jnp.dot(h, r),
        "joined": jnp.tanh(both) @ weights["joined"],
        "logits": jax.nn.log_softmax(gelu @ weights["logits"]),
        "sum": both.sum(),
        "max": r.max(),
        "stacked": stacked.sum(0),
        "flat": stacked.reshape(-1) @ weights["flat"],
        "heads": (h @ weights["gates"])[:36].reshape(3, 12).sum(1),
        "positive": jnp.any(r > 3),
        "all": jnp.all(r > -30),
        "argmax": jnp.argmax(r),
        "some": r[2:5],
        "column": r[jnp.array([0, 39])],
        "attended": jax.nn.softmax(stacked @ r) @ stacked,
        "matrix": jnp.outer(x[:2], h),
        "padded": jnp.pad(h, (0, 2)) @ weights["padded"],
        "written": jnp.zeros((3, 40)).at[1].set(r),
        "cumulative": jnp.cumsum(r)[-1],
        "mask": jnp.where(h > 0, r, -1e9).max(),
        "scaled": r * x[0] + 1.0,
        "moved": jnp.roll(stacked, 1, axis=0),
        "half": h[:20] + r[20:],
        "rotated": jnp.roll(h, 3),
        "norm": jnp.linalg.norm(r),
        "turned": weights["square"] @ h,
        "integers": r.astype(jnp.int32),
        "min": jnp.minimum(r, h).min(),
        "product": jnp.prod(jnp.tanh(h) * 0.01 + 1.0),
        "reversed": h[::-1] @ weights["square"],
    }


def row_weights():
    shapes = {
        "square": (40, 40),
        "gates": (40, 120),
        "bias": (120,),
        "narrow": (40, 3),
        "joined": (83, 16),
        "logits": (40, 12),
        "flat": (80, 10),
        "padded": (42, 4),
        "cut": (90, 4),
    }
    rng = np.random.default_rng(4)
    return {name: jax.device_put(np.float32(rng.normal(size=shape) * 0.3)) for name, shape in shapes.items()}


def branches(x, i, b):
    switched = lax.switch(i, [lambda v: v * 2, lambda v: -v, lambda v: jnp.zeros_like(v)], x)
    both = lax.cond(b, lambda v: (v.sum(), i), lambda v: (v[0], i + 1), x)
    nested = lax.cond(b, lambda v: lax.cond(v[0] > 0, jnp.sin, jnp.cos, v), lambda v: v, x)
    keyed = lax.cond(b, lambda k: jax.random.split(k)[0], lambda k: k, jax.random.key(i))
    return [switched, both, nested, lax.cond(True, jnp.sin, jnp.cos, x), keyed, jax.random.uniform(keyed)]


def loops(shared, x, i):
    until = lax.while_loop(
        lambda c: c[0] < i, lambda c: (c[0] + 1, c[1] * 1.1 + shared[0], c[2]), (0, x, jnp.float32(3))
    )
    long = lax.fori_loop(0, 300, lambda t, c: c + jnp.sin(c + t.astype(jnp.float32)) * 0.01, x)
    short = lax.fori_loop(0, 4, lambda t, c: c.at[t].add(shared[t]), x)
    carry, history = lax.scan(lambda c, v: (c * 0.5 + v, c), jnp.float32(0), x)
    back = lax.scan(lambda c, v: (c + v, c * v), jnp.float32(1), x, reverse=True)
    counted = lax.scan(lambda c, t: (c + shared[t % 3] * c, c[0]), x, jnp.arange(90))
    tabled = lax.scan(lambda c, v: (c * 0.9 + v, None), x[0], jnp.sin(jnp.arange(700.0)))[0]
    nested = lax.fori_loop(0, i, lambda t, c: lax.while_loop(lambda d: d < c + 1, lambda d: d + 1, c) + t, i)
    held = lax.scan(lambda c, v: (c + jnp.sin(v), c), jnp.float32(0), jnp.concatenate([x] * 10), length=40)
    keyed = lax.fori_loop(0, i, lambda t, k: jax.random.fold_in(k, t), jax.random.key(3))
    found = lax.while_loop(
        lambda c: (c[1] < 5) & (x[c[1] % 4] < 0),
        lambda c: (c[0] + x[c[1] % 4], c[1] + 1),
        (jnp.float32(0), jnp.int32(0)),
    )
    return [
        until,
        long,
        short,
        (carry, history),
        back,
        counted,
        tabled,
        nested,
        held,
        keyed,
        found,
        jax.lax.map(jnp.sin, x),
    ]


def row_loops(weights, h, n):
    step = lambda t, c: jnp.tanh(c @ weights["square"] + weights["bias"][:40])
    return [
        lax.fori_loop(0, n, step, h),
        lax.fori_loop(0, 3, step, h),
        lax.scan(lambda c, _: (step(0, c), c.sum()), jnp.zeros(40), length=5),
    ]


def made_of_numbers(weights, h, n):
    """Rows that are single numbers side by side, where rows are expected; and rows that hold no floats."""
    few = lambda r: jnp.concatenate([jnp.tanh(r[:4])] * 10)
    r = h @ weights["square"]
    known = jnp.where(jnp.zeros((), bool), r, few(h))
    return {
        "after turns": lax.fori_loop(0, n, lambda t, c: few(c @ weights["square"]), h),
        "sum": known.sum(),
        "max": known.max(),
        "positive": r > 0,
        "whole": r.astype(jnp.int32) + jnp.arange(40, dtype=jnp.int32),
        "bytes": r.astype(jnp.int8),
    }


def draws(key, i):
    a, b, c = jax.random.split(key, 3)
    mine = jax.random.fold_in(a, i)
    many = jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(b, 3))
    raw = jax.random.PRNGKey(i)
    return {
        "uniform": jax.random.uniform(a, (3,), minval=-2.0, maxval=5.0),
        "normal": jax.random.normal(mine, (2, 2)),
        "key": mine,
        "many": many,
        "raw": raw,
        "integers": jax.random.randint(b, (4,), -3, 9),
        "own": jax.random.randint(b, (), 0, i + 1),
        "coin": jax.random.bernoulli(c, 0.3, (3,)),
        "categorical": jax.random.categorical(c, jnp.arange(5.0)),
        "gumbel": jax.random.gumbel(a, (2,)),
        "exponential": jax.random.exponential(a),
        "truncated": jax.random.truncated_normal(b, -1.0, 2.0, (2,)),
        "bits": jax.random.bits(a, (3,)),
        "bytes": jax.random.bits(a, (5,), jnp.uint8),
        "from_raw": jax.random.uniform(raw),
        "raw_split": jax.random.split(raw),
        "data": jax.random.key_data(mine),
        "laplace": jax.random.laplace(c),
        "wrapped": jax.random.uniform(jax.random.wrap_key_data(raw)),
        "chosen": jnp.where(i > 2, a, b),
        "picked": jax.random.split(key, 4)[i % 4],
        "rademacher": jax.random.rademacher(c, (3,)),
        "shorts": jax.random.bits(b, (3,), jnp.uint16),
        "cloned": jax.random.clone(a),
        "folded": jax.random.uniform(jax.vmap(jax.random.fold_in, (None, 0))(a, jnp.arange(3))[1]),
        "small": jax.random.randint(a, (), 0, 200, jnp.uint8),
    }


def gamma_functions(x):
    return [lax.lgamma(x), lax.lgamma(10 * x), lax.lgamma(SPECIAL[1]), jax.scipy.special.betaln(jnp.abs(x), 2.0)]


def distributions(key, x):
    a, b, c = jax.random.split(key, 3)
    shape = jnp.abs(x) + 0.1
    return {
        "gamma": jax.random.gamma(a, shape),
        "gammas": jax.random.gamma(b, 2.5, (6,)),
        "logarithm": jax.random.loggamma(c, shape[0]),
        "beta": jax.random.beta(a, shape[0], 2.0),
        "few": jax.random.poisson(b, shape[1]),
        "many": jax.random.poisson(c, 20 * shape[2]),
        "binomial": jax.random.binomial(a, 12.0, 0.3),
    }


def shuffles(key):
    a, b, c = jax.random.split(key, 3)
    p = jnp.array([0.1, 0.2, 0.3, 0.4])
    return [
        jax.random.permutation(a, 6),
        jax.random.choice(b, 5),
        jax.random.choice(b, 4, (2,), replace=False),
        jax.random.choice(c, 4, p=p),
        jax.random.choice(a, jnp.arange(6.0), (3,), replace=False),
    ]


def host_sin(x):
    return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


@jax.custom_vjp
def twice(x):
    return x * 2


twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


def wrappers(x):
    slope = jax.grad(lambda v: jnp.sum(twice(jnp.sin(v)) * jax.nn.relu(v)))(x)
    dead = host_sin(x)  # nobody reads it
    _ = dead + 1
    kept = jax.checkpoint(lambda v: jnp.sin(v) * 2)(x)
    inner = jax.jit(lambda v: (host_sin(v), v + 1))(x)[1]
    return [
        slope,
        kept,
        twice(x),
        jax.nn.softplus(x),
        lax.stop_gradient(x),
        lax.optimization_barrier(x),
        jax.nn.silu(x),
        jax.nn.leaky_relu(x),
        inner,
        jax.jvp(jnp.tanh, (x,), (x,))[1],
        jax.vmap(lambda v: v**2)(x),
        jax.nn.one_hot(jnp.argmax(x), 3),
        jnp.interp(x[0], jnp.arange(3.0), x),
    ]


def positive(m):
    return m @ m.T + 2.0 * jnp.eye(len(m), dtype=m.dtype)


def linear_systems(m, b):
    """Solutions of systems whose matrices need pivoting: `m` is `[4, 4]`, `b` is `[4]`."""
    well = m + 4.0 * jnp.eye(4)[jnp.array([2, 0, 3, 1])]
    definite, factors = positive(m), linalg.lu_factor(well)
    sides = [(lower, turned, unit) for lower in (True, False) for turned in (0, 1) for unit in (True, False)]
    pairs = well.reshape(2, 2, 4)[..., :2] + 3.0 * jnp.eye(2)[None]
    return {
        "solve": jnp.linalg.solve(well, b),
        "several": jnp.linalg.solve(well, m),
        "batched": jnp.linalg.solve(pairs, b.reshape(2, 2, 1)),
        "inverse": jnp.linalg.inv(well),
        "power": jnp.linalg.matrix_power(well, -1),
        "determinants": [jnp.linalg.det(well), jnp.linalg.det(m[:3, :3]), jnp.linalg.det(m[:2, :2])],
        "sign and logarithm": jnp.linalg.slogdet(well),
        "roots": [jnp.linalg.cholesky(definite), jnp.linalg.cholesky(definite, upper=True)],
        "by roots": linalg.cho_solve(linalg.cho_factor(definite), b),
        "factors": linalg.lu(well),
        "by factors": [linalg.lu_solve(factors, b), linalg.lu_solve(factors, b, trans=1)],
        "triangles": [linalg.solve_triangular(well, b, lower=k, trans=t, unit_diagonal=u) for k, t, u in sides],
        "on the right": [
            lax.linalg.triangular_solve(definite, m, left_side=False, lower=lower, transpose_a=turned)
            for lower in (True, False)
            for turned in (True, False)
        ],
        "not square": [lax.linalg.lu(m[:2]), lax.linalg.lu(m[:, :3])],
        "gradients": [
            jax.grad(lambda a: jnp.linalg.solve(a, b).sum())(well),
            jax.grad(jnp.linalg.det)(well),
            jax.grad(lambda a: jnp.linalg.cholesky(positive(a)).sum())(m),
        ],
    }


SINGULAR = jnp.asarray(
    [
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
        [[1, 2, 3], [2, 4, 6], [1, 0, 1]],
        [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 0]],
        [[2, -2, 1], [-2, 2, 1], [1, 1, 1]],
    ],
    jnp.float32,
)
"""Whose factors are exact; the last is regular, but not positive definite."""


def singular(m):
    b = jnp.array([1.0, 0.0, 2.0])
    indefinite = jnp.linalg.cholesky(m)
    solved = [jnp.linalg.solve(m, b), jnp.linalg.inv(m), linalg.solve_triangular(m, b)]
    return [*solved, jnp.linalg.det(m), jnp.linalg.slogdet(m), lax.linalg.lu(m), indefinite]


def pooled(x, n, h):
    m, r = x.reshape(3, 4), h.reshape(2, 2, 40)
    pool = lambda a, first, op, size, steps, edge="VALID", **how: lax.reduce_window(
        a, first, op, size, steps, edge, **how
    )
    return [
        pool(m, -jnp.inf, lax.max, (2, 2), (1, 1)),
        pool(m, jnp.inf, lax.min, (2, 2), (2, 2), "SAME"),
        pool(m, 0.0, lax.add, (2, 3), (1, 2), ((1, 2), (0, 1))),
        pool(m, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME", base_dilation=(2, 1), window_dilation=(1, 2)),
        pool(m, -jnp.inf, lax.max, (5, 5), (1, 1)),
        pool(x, 0.0, lax.add, (3,), (1,), ((2, 0),)),
        pool(n, 0, lax.add, (2,), (2,)),
        pool(n, np.iinfo(np.int32).min, lax.max, (3,), (1,), "SAME"),
        pool(m, 1.0, lax.mul, (2, 2), (1, 1), "SAME"),
        pool((m, -m), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (2, 2), (1, 1)),
        jax.grad(lambda v: pool(v, 0.0, lax.add, (2, 2), (2, 2), "SAME").sum() ** 2)(m),
        pool(r, -jnp.inf, lax.max, (2, 2, 1), (1, 1, 1)),
        pool(r, 0.0, lax.add, (1, 2, 1), (1, 1, 1), "SAME"),
    ]


def convolve(image, kernel, steps=(1, 1), edge="VALID", layout=("NHWC", "HWIO", "NHWC"), **how):
    return lax.conv_general_dilated(image, kernel, steps, edge, dimension_numbers=layout, **how)


FILTER = np.linspace(-1.0, 1.0, 72, dtype=np.float32).reshape(3, 3, 2, 4)


def convolutions(weights, x, y, h):
    """Convolutions of images `[1, 4, 5, 2]` with weights that are known, shared, and the environment's own."""
    image, own = x.reshape(1, 4, 5, 2), y.reshape(2, 2, 2, 1)
    return {
        "of vectors": [
            jnp.convolve(y, jnp.array([1.0, 2.0, 1.0])),
            jnp.convolve(y, x[:3], mode="same"),
            jnp.convolve(jnp.array([1.0, -1.0]), y, mode="valid"),
            jnp.correlate(y, y[:2]),
        ],
        "of planes": jax.scipy.signal.convolve2d(image[0, ..., 0], x[:4].reshape(2, 2), mode="same"),
        "few channels": [convolve(image, weights["few"]), convolve(image, weights["few"], edge="SAME")],
        "many channels": [convolve(image, weights["many"]), convolve(image, weights["many"], edge="SAME")],
        "known": convolve(image, jnp.asarray(FILTER), (2, 1), "SAME"),
        "own": convolve(image, own),
    }


def odd_convolutions(weights, x, y, h):
    """Dilated, grouped and transposed convolutions of an image `[1, 4, 5, 2]`, in other layouts and types."""
    image, own = x.reshape(1, 4, 5, 2), y.reshape(2, 2, 2, 1)
    first_channels = (jnp.moveaxis(image, 3, 1), jnp.moveaxis(weights["many"], (2, 3), (1, 0)))
    return {
        "dilated": [
            convolve(image, own, (1, 2), ((1, 0), (0, 2)), lhs_dilation=(2, 1), rhs_dilation=(1, 2)),
            convolve(image, weights["many"], (1, 1), ((2, 1), (0, 1)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)),
        ],
        "channels first": convolve(*first_channels, layout=("NCHW", "OIHW", "NCHW")),
        "in groups": [
            convolve(image, weights["depth"], feature_group_count=2),
            convolve(image, weights["groups"], feature_group_count=2),
            convolve(image, own.reshape(2, 2, 1, 2), feature_group_count=2),
        ],
        "whole numbers": convolve(image.astype(jnp.int32), jnp.asarray(FILTER * 5).astype(jnp.int32)),
        "transposed": lax.conv_transpose(image, weights["few"], (2, 2), "SAME"),
        "of two": convolve(jnp.concatenate([image, -image]), own),
        "shared": convolve(weights["few"][None, :, :, :, 0], own),
    }


def convolution_layers(weights, x, y, h):
    """Networks of convolutions of an image `[1, 4, 5, 2]`, and gradients."""
    image, own, r = x.reshape(1, 4, 5, 2), y.reshape(2, 2, 2, 1), h.reshape(1, 2, 2, 40)
    return {
        "layers": convolve(jax.nn.relu(convolve(image, weights["many"])), weights["second"]),
        "to a vector": convolve(
            jax.nn.relu(convolve(image, weights["wide"])), weights["third"], edge="SAME"
        ).reshape(-1)
        @ weights["flat"],
        "of rows": convolve(r, weights["rows"], edge="SAME"),
        "gradients": [
            jax.grad(lambda v: convolve(v, weights["few"]).sum() ** 2)(image),
            jax.grad(lambda k: convolve(image, k).sum() ** 2)(own),
        ],
    }


def convolution_weights():
    shapes = {
        "few": (2, 2, 2, 3),
        "many": (3, 3, 2, 12),
        "depth": (2, 2, 1, 2),
        "groups": (2, 2, 1, 24),
        "second": (2, 2, 12, 9),
        "wide": (2, 2, 2, 40),
        "third": (2, 2, 40, 3),
        "flat": (36, 5),
        "rows": (2, 2, 40, 16),
    }
    rng = np.random.default_rng(5)
    return {name: jax.device_put(np.float32(rng.normal(size=shape) * 0.3)) for name, shape in shapes.items()}


FUNCTIONS = {
    "smooth": (smooth, (), (floats((3,)),)),
    "edges": (edges, (), (SPECIAL,)),
    "whole_numbers": (whole_numbers, (), (integers((4,), -50, 50), integers((4,), 1, 9, 1))),
    "conversions": (conversions, (), (floats((3,), scale=20.0), integers((3,), -300, 300), booleans((3,)))),
    "short_conversions": (short_conversions, (), (floats((3,), scale=20.0),)),
    "choices": (choices, (), (floats((4,)), integers((4,), 0, 9), booleans((4,)))),
    "shapes": (shapes, (), (floats((12,)), floats((4,), 1))),
    "reads": (reads, (), (floats((12,)), integers((), 0, 3), integers((), 0, 4, 1), integers((), -20, 20, 2))),
    "writes": (writes, (), (floats((12,)), integers((), 0, 3), integers((), 0, 4, 1), integers((), -20, 20, 2))),
    "tables": (
        tables,
        (jnp.asarray(TABLE) * 2,),
        (integers((), 0, 3), integers((), 0, 4, 1), integers((), -40, 40, 2)),
    ),
    "totals": (totals, (), (floats((12,)), integers((6,), -9, 9), booleans((4,)))),
    "not_numbers": (not_numbers, (), (SPECIAL,)),
    "sorts": (sorts, (), (floats((6,)), integers((6,), 0, 5))),
    "products": (products, (weights(),), (floats((12,)), floats((4,), 1))),
    "linear_systems": (linear_systems, (), (floats((4, 4)), floats((4,), 1))),
    "singular": (singular, (), (SINGULAR,)),
    "pooled": (pooled, (), (floats((12,)), integers((6,), -5, 5), floats((160,), 1))),
    **{
        function.__name__: (
            function,
            (convolution_weights(),),
            (floats((40,), scale=1.0), floats((8,), 1, 1.0), floats((160,), 2, 1.0)),
        )
        for function in (convolutions, odd_convolutions, convolution_layers)
    },
    "rows": (rows, (row_weights(),), (floats((40,)), floats((3,), 1), booleans(()))),
    "short_floats": (short_floats, (row_weights(),), (floats((40,)), floats((3,), 1))),
    "deep_rows": (deep_rows, (row_weights(),), (floats((40,)),)),
    "branches": (branches, (), (floats((3,)), integers((), 0, 3), booleans(()))),
    "loops": (loops, (jnp.array([0.1, -0.2, 0.3, 0.4]),), (floats((4,), scale=0.5), integers((), 0, 7))),
    "row_loops": (row_loops, (row_weights(),), (floats((40,)), integers((), 0, 7))),
    "made_of_numbers": (made_of_numbers, (row_weights(),), (floats((40,)), integers((), 0, 7))),
    "draws": (draws, (), (keys(), integers((), 0, 9))),
    "gamma_functions": (gamma_functions, (), (floats((3,)),)),
    "distributions": (distributions, (), (keys(), floats((3,)))),
    "shuffles": (shuffles, (), (keys(),)),
    "wrappers": (wrappers, (), (floats((3,)),)),
}
