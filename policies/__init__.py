"""Ships as ``autoprec.policies``: policies that plan a whole map (``analytic``), and learned ones once there are any.

The callback knows them by name only (``policy="fisher"``) and imports them on use. Import it as ``autoprec.policies``,
never as ``policies``.
"""
