"""What `attnlab COMMAND --help` prints."""

from absl import flags


def help_text(usage: str, values: flags.FlagValues) -> str:
    """The usage and the flags that are attnlab's own."""
    modules = [name for name in values.flags_by_module_dict() if name != flags.__name__]
    return '\n'.join([usage, *map(values.module_help, modules)])
