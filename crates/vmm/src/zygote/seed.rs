//! The seed of a running machine becomes a zygote.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;

use super::Zygote;
use super::report::refusal;
use crate::disk::layers::Lower;
use crate::error::Error;
use crate::fork::branch::Seed;
use crate::fork::plan::ForkPlan;
use crate::jail::{self, filter};
use crate::machine::Frozen;
use crate::sys::{descriptors, handed, process};

/// A seed's whole life ([`crate::fork::branch::SeedLife`]).  Says through `report` when it listens
/// in `directory`: an empty object, or the payload of an ERROR frame.
pub fn live(seed: Seed, directory: &Path, report: &File) -> ! {
    let (said, zygote) = match start(seed, directory, report) {
        Ok(zygote) => (b"{}".to_vec(), Some(zygote)),
        Err(error) => (refusal(error.body()), None),
    };
    // In one piece: a pipe takes this much at once or not at all.
    let told = (&*report).write_all(&said).is_ok();
    let closed = descriptors::close_in_child(report.as_raw_fd()).is_ok();
    // A seed that nobody waits for is nobody's.
    let ended = match zygote {
        Some(zygote) if told && closed => zygote.run(),
        _ => process::exit_now(1),
    };
    process::exit_now(i32::from(ended.is_err()))
}

fn start(seed: Seed, directory: &Path, report: &File) -> Result<Zygote, Error> {
    filter::log_to(None);
    let Seed { frozen, ram, origin } = seed;
    let mut keep = vec![0, 1, 2, report.as_raw_fd()];
    keep.extend(handed::descriptors());
    let Frozen { state, disk } = *frozen;
    let lower = disk.map(|(lower, _)| lower);
    keep.extend(lower.iter().flat_map(Lower::descriptors));
    // Its forks go back to their fork point by way of these.
    keep.extend(ram.descriptors());
    keep.extend(origin.iter().map(|plan| plan.notebook().descriptor()));
    descriptors::close_all_but(&keep)?;
    jail::show_ourselves()?;
    process::new_session()?;
    process::mind_children(true);
    let plan = ForkPlan::of_live(state, ram, lower, origin.as_deref())?;
    Zygote::serve(plan, directory)
}
