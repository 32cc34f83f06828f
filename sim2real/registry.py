"""Commands of this package: name -> "module:function"."""

COMMANDS = {
    "export": "sim2real.commands.export:main",
    "verify": "sim2real.commands.verify:main",
}
