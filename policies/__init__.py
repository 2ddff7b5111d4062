"""Ships as ``autoprec.policies``: policies that plan a whole map (``analytic``), learned ones (``pretrained_policy``).

The callback knows them by name only (``policy="fisher"``) and imports them on use. Import it as ``autoprec.policies``,
never as ``policies``.
"""
