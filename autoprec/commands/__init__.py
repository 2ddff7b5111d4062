"""Commands of ``autoprec``, one module each, with ``add_to`` that puts the command into the application."""
