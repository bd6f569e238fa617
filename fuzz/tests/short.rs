//! The harnesses for a short while, from a seeded generator: what CI runs.
//!
//! `FORKD_FUZZ_RUNS` says how many inputs each harness gets.

use std::env;

/// Longest input, in bytes.
const INPUT_BYTES_MAX: u64 = 1024;
const RUNS: u64 = 30_000;

/// splitmix64: small, seeded, and the same everywhere.
struct Generator(u64);

impl Generator {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Bytes of which many are small, as lengths and choices tend to be.
    fn input(&mut self) -> Vec<u8> {
        let length = self.next() % INPUT_BYTES_MAX;
        let small = self.next() % 4;
        (0..length)
            .map(|_| {
                let [byte, choice, ..] = self.next().to_le_bytes();
                if u64::from(choice % 4) < small { byte % 16 } else { byte }
            })
            .collect()
    }
}

fn run(name: &str) {
    let runs = env::var("FORKD_FUZZ_RUNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(RUNS);
    let (_, harness) =
        forkd_fuzz::HARNESSES.into_iter().find(|(other, _)| *other == name).expect("a harness");
    let mut generator = Generator(name.bytes().map(u64::from).sum());
    for _ in 0..runs {
        harness(&generator.input());
    }
}

macro_rules! harnesses {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            run(stringify!($name));
        })*

        #[test]
        fn every_harness_is_run() {
            let run = [$(stringify!($name)),*];
            assert_eq!(forkd_fuzz::HARNESSES.map(|(name, _)| name), run);
        }
    };
}

harnesses!(mmio_block mmio_net mmio_rng vsock layered_disk device_states frame);
