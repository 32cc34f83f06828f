"""Commands of this package: name -> "module:function"."""

COMMANDS = {
    "dataset": "offline.commands.dataset:main",
}
