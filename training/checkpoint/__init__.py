"""Atomic checkpoints, from which runs resume bit for bit.

    RUN/checkpoints/step_00001000/
        state.json               progress, configuration, settings that must match to resume
        model.safetensors        weights
        optimizer.safetensors    optimizer state by weight, as NAME.exp_avg
        processes.safetensors    state of each process, such as its RNG, as rank_N.NAME
        SHA256SUMS               hashes of all these files, for `sha256sum -c SHA256SUMS`

A checkpoint is written into a folder with a temporary name, synced to disk and renamed. If a run is
killed while saving, older checkpoints stay, and nothing looks like a new one. The files cannot
contain code, and each is read only after its sha256 was verified.
"""
