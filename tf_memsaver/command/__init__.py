"""What stands behind the command line: flags and help, the model that is named, the verbs, the output folder."""
