"""Ships as ``autoprec.envs``: the knobs of a training run as a reinforcement-learning environment.

Import it as ``autoprec.envs``, never as ``envs``. Reading order: ``proxies`` (what is trained), ``engine`` (the C
kernels), ``simulation`` (many runs and their time), ``observing``, ``reward``, ``proxy_env`` (the environment).
"""
