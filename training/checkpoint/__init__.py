"""Checkpoints that are whole or not there, and runs that go on from them bit for bit.

    RUN/checkpoints/step_00001000/
        state.json               progress, configuration, what a run must share to go on from here
        model.safetensors        the weights
        optimizer.safetensors    NAME.exp_avg and the like, by the names of the weights
        processes.safetensors    rank_N.NAME: what each process has of its own, as random state
        SHA256SUMS               of all of these; `sha256sum -c SHA256SUMS` checks them, too

A checkpoint is written into a folder of another name, synced to disk and renamed: a run that is
killed while saving leaves its older checkpoints and nothing that could be taken for a new one. None
of the files can hold code, and none is read before its sha256 was found to be right.
"""
