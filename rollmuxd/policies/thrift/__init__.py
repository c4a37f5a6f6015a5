"""The default policy: schedules in which jobs run at different rates, and moves between groups that pay."""
