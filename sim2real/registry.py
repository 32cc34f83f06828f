"""Commands of this package: name -> "module:function"."""

COMMANDS: dict[str, str] = {}
