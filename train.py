"""Train: ``python train.py strategy=ring``. ``python train.py --help`` lists every choice."""

from drivetrain.app import run

if __name__ == "__main__":
    raise SystemExit(run())
