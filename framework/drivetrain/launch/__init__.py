"""How the worker processes of a job come to be, find each other, and end. Importing this package imports no torch."""

from drivetrain.launch.environment import current_job, detect, set_current_job
from drivetrain.launch.job import Job
from drivetrain.launch.local import launch
from drivetrain.launch.rendezvous import destroy_process_group, init_group_of_one, init_process_group, job_store
from drivetrain.launch.signals import handling, pending

__all__ = [
    "Job",
    "current_job",
    "destroy_process_group",
    "detect",
    "handling",
    "init_group_of_one",
    "init_process_group",
    "job_store",
    "launch",
    "pending",
    "set_current_job",
]
