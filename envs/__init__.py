"""Ships as ``autoprec.envs``: the knobs of a training run as a reinforcement-learning environment.

Import it as ``autoprec.envs``, never as ``envs``. Reading order: ``proxies`` (what is trained), ``engine`` (the C
kernels), ``simulation`` (many runs and their time), ``observing``, ``reward``, ``proxy_env`` (the environment); for the
user's own module ``training_env``, then ``episode`` (one fit) and ``paused_thread`` (how a fit stands still).

Where gymnasium is installed, importing this registers ``autoprec/Training-v0`` and ``autoprec/Proxy-v0``.
"""

from importlib.util import find_spec

_ENVIRONMENTS = {
    "autoprec/Training-v0": "autoprec.envs.training_env:TrainingEnv",
    "autoprec/Proxy-v0": "autoprec.envs.proxy_run:ProxyRunEnv",
}


def _register() -> None:
    if find_spec("gymnasium") is None:
        return
    from gymnasium.envs.registration import register, registry

    for name, entry_point in _ENVIRONMENTS.items():
        if name not in registry:
            # a training goes by the clock unless it is told what time costs
            register(name, entry_point=entry_point, nondeterministic=name.startswith("autoprec/Training"))


_register()
