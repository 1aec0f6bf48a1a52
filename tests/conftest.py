from hypothesis import settings

# A deadline would make a test depend on how busy the machine is.
settings.register_profile("foretrain", deadline=None)
settings.load_profile("foretrain")
