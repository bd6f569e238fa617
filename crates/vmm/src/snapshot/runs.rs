//! The table of runs that `memory` and `disk.layer` share: which units of 4 KiB the file holds.

use crate::error::Error;
use crate::snapshot::header::{BodyReader, BodyWriter};
use std::io::Write;

/// Bytes of one unit: a page or a block.
pub const UNIT_BYTES: u64 = 4096;
/// Most runs that a file may claim.  Half of the pages of the largest machine, alternating.
const RUNS_MAX: u64 = (crate::layout::MEMORY_BYTES_MAX / UNIT_BYTES) / 2;
/// Bytes of the table before its runs.
const FIXED_BYTES: u64 = 32;

/// Consecutive units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the first.
    pub first: u64,
    /// How many; never 0.
    pub count: u64,
}

/// What a file holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// Bytes of the memory or disk as a whole.
    pub total_bytes: u64,
    /// Ascending, disjoint, not adjacent.
    pub runs: Vec<Run>,
}

impl Table {
    /// How many units the runs hold.
    #[must_use]
    pub fn units(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Offset, in the file, of the first unit.
    #[must_use]
    pub fn data_offset(&self) -> u64 {
        super::header::HEADER_BYTES as u64 + FIXED_BYTES + 16 * self.runs.len() as u64
    }

    /// Writes the table at the start of a body.
    ///
    /// # Errors
    ///
    /// [`Error::Io`].
    pub fn write(&self, writer: &mut BodyWriter) -> Result<(), Error> {
        let mut bytes = Vec::with_capacity(32 + 16 * self.runs.len());
        for word in [self.total_bytes, UNIT_BYTES, self.runs.len() as u64, self.units()] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        for run in &self.runs {
            bytes.extend_from_slice(&run.first.to_le_bytes());
            bytes.extend_from_slice(&run.count.to_le_bytes());
        }
        writer.write_all(&bytes).map_err(Error::io("write a table of runs"))
    }

    /// Reads the table from the start of a body, and checks everything that later code relies on.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the runs are not ascending, leave the total, or do not fill the body.
    pub fn read(reader: &mut BodyReader) -> Result<Self, Error> {
        let damaged =
            |name: &str, how: &str| Error::Damaged(format!("{name}: table of runs: {how}"));
        let name = reader.name().to_owned();
        let total_bytes = reader.word()?;
        let unit = reader.word()?;
        let (run_count, units) = (reader.word()?, reader.word()?);
        // Runs do not touch, so there is a unit between any two.
        let runs_max = RUNS_MAX.min((total_bytes / UNIT_BYTES).div_ceil(2));
        if unit != UNIT_BYTES || total_bytes % UNIT_BYTES != 0 || run_count > runs_max {
            return Err(damaged(&name, "its sizes make no sense"));
        }
        let body = run_count.checked_mul(16).zip(units.checked_mul(UNIT_BYTES));
        if body.and_then(|(table, data)| table.checked_add(data)) != Some(reader.left()) {
            return Err(damaged(&name, "it does not match the length of the file"));
        }
        let mut runs = Vec::new();
        let (mut end, mut sum) = (0, 0_u64);
        for index in 0..run_count {
            let run = Run { first: reader.word()?, count: reader.word()? };
            let after =
                run.first.checked_add(run.count).ok_or_else(|| damaged(&name, "overflow"))?;
            let adjacent = index > 0 && run.first <= end;
            if run.count == 0 || adjacent || after > total_bytes / UNIT_BYTES {
                return Err(damaged(&name, "a run is empty, out of order or out of range"));
            }
            (end, sum) = (after, sum + run.count);
            runs.push(run);
        }
        if sum != units {
            return Err(damaged(&name, "its runs do not add up"));
        }
        Ok(Self { total_bytes, runs })
    }
}

/// Where in the file each unit is.
#[derive(Debug)]
pub struct Index {
    /// Each run, with the offset of its first unit in the file.
    entries: Vec<(Run, u64)>,
}

impl Index {
    /// The index of a file with this table.
    #[must_use]
    pub fn of(table: &Table) -> Self {
        let mut offset = table.data_offset();
        let place = |run: &Run| {
            let start = offset;
            offset += run.count * UNIT_BYTES;
            (*run, start)
        };
        Self { entries: table.runs.iter().map(place).collect() }
    }

    /// Offset of this unit; `None` if the file lacks it.
    #[must_use]
    pub fn offset_of(&self, unit: u64) -> Option<u64> {
        let after = self.entries.partition_point(|(run, _)| run.first <= unit);
        let (run, offset) = self.entries.get(after.checked_sub(1)?)?;
        let into = unit - run.first;
        (into < run.count).then(|| offset + into * UNIT_BYTES)
    }

    /// The runs.
    pub fn runs(&self) -> impl Iterator<Item = Run> + '_ {
        self.entries.iter().map(|(run, _)| *run)
    }
}

/// A set of units: one bit for each that there could be.
#[derive(Debug)]
pub struct Units(Vec<u64>);

impl Units {
    /// None of the units of `total_bytes`.
    #[must_use]
    pub fn none_of(total_bytes: u64) -> Self {
        let words = (total_bytes / UNIT_BYTES).div_ceil(64);
        Self(vec![0; usize::try_from(words).unwrap_or(0)])
    }

    /// Adds one; nothing happens if there can be no such unit.
    pub fn add(&mut self, unit: u64) {
        if let Some(word) = usize::try_from(unit / 64).ok().and_then(|at| self.0.get_mut(at)) {
            *word |= 1 << (unit % 64);
        }
    }

    /// Adds all units of some runs.
    pub fn add_runs(&mut self, runs: impl IntoIterator<Item = Run>) {
        for run in runs {
            for unit in run.first..run.first + run.count {
                self.add(unit);
            }
        }
    }

    /// Takes all units of some runs out.
    pub fn remove_runs(&mut self, runs: impl IntoIterator<Item = Run>) {
        for unit in runs.into_iter().flat_map(|run| run.first..run.first + run.count) {
            if let Some(word) = usize::try_from(unit / 64).ok().and_then(|at| self.0.get_mut(at)) {
                *word &= !(1 << (unit % 64));
            }
        }
    }

    /// Whether it is one of them.
    #[must_use]
    pub fn contains(&self, unit: u64) -> bool {
        let word = usize::try_from(unit / 64).ok().and_then(|at| self.0.get(at));
        word.is_some_and(|word| word >> (unit % 64) & 1 == 1)
    }

    /// The units, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        let words = self.0.iter().zip((0..).step_by(64)).filter(|(word, _)| **word != 0);
        words.flat_map(|(word, first)| {
            (0..64).filter(move |bit| word >> bit & 1 == 1).map(move |bit| first + bit)
        })
    }
}

/// Collects single units into runs.  Units must be added in ascending order.
#[derive(Debug, Default)]
pub struct Collector {
    runs: Vec<Run>,
}

impl Collector {
    /// Adds one unit.
    pub fn add(&mut self, unit: u64) {
        match self.runs.last_mut() {
            Some(last) if last.first + last.count == unit => last.count += 1,
            _ => self.runs.push(Run { first: unit, count: 1 }),
        }
    }

    /// The runs.
    #[must_use]
    pub fn into_runs(self) -> Vec<Run> {
        self.runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::header::Kind;
    use forkd_proto::control::ErrorCode;

    #[test]
    fn units_come_back_in_order() {
        let mut units = Units::none_of(1000 * UNIT_BYTES);
        for unit in [999, 0, 64, 63, 1000 * 64] {
            units.add(unit);
        }

        assert_eq!(units.iter().collect::<Vec<_>>(), [0, 63, 64, 999]);
    }

    #[test]
    fn a_unit_is_found_where_its_run_lies_and_nowhere_else() {
        let runs = vec![Run { first: 2, count: 2 }, Run { first: 9, count: 1 }];
        let table = Table { total_bytes: 40960, runs };

        let index = Index::of(&table);

        let start = table.data_offset();
        let found = [1, 2, 3, 4, 9, 10].map(|unit| index.offset_of(unit));
        let expected = [None, Some(start), Some(start + 4096), None, Some(start + 8192), None];
        assert_eq!(found, expected);
    }

    fn round_trip(table: &Table, name: &str) -> Result<Table, Error> {
        let path = std::env::temp_dir().join(format!("forkd-runs-{}-{name}", std::process::id()));
        let mut writer = BodyWriter::create(&path, Kind::Memory).unwrap();
        table.write(&mut writer).unwrap();
        let units = usize::try_from(table.units() * UNIT_BYTES).unwrap();
        writer.write_all(&vec![1; units]).unwrap();
        writer.commit().unwrap();
        let read = Table::read(&mut BodyReader::open(&path, Kind::Memory).unwrap());
        std::fs::remove_file(&path).unwrap();
        read
    }

    #[test]
    fn a_table_reads_back_as_written() {
        let runs = vec![Run { first: 0, count: 2 }, Run { first: 5, count: 1 }];
        let table = Table { total_bytes: 16 * UNIT_BYTES, runs };

        assert_eq!(round_trip(&table, "good").unwrap(), table);
    }

    #[test]
    fn runs_out_of_order_or_out_of_range_are_damage() {
        for (name, first) in [("order", 1), ("adjacent", 4), ("range", 16)] {
            let runs = vec![Run { first: 2, count: 2 }, Run { first, count: 1 }];
            let table = Table { total_bytes: 16 * UNIT_BYTES, runs };

            assert_eq!(round_trip(&table, name).unwrap_err().code(), ErrorCode::Damaged, "{name}");
        }
    }

    #[test]
    fn one_run_more_than_there_can_be_is_damage() {
        let alternate = |count: u64| (0..count).map(|run| Run { first: run * 2, count: 1 });
        let table = |count| Table { total_bytes: 7 * UNIT_BYTES, runs: alternate(count).collect() };

        assert!(round_trip(&table(4), "most").is_ok());
        let refused = round_trip(&table(5), "more").unwrap_err();

        assert!(refused.to_string().contains("its sizes make no sense"), "{refused}");
    }

    #[test]
    fn consecutive_units_become_one_run() {
        let mut collector = Collector::default();

        for unit in [1, 2, 3, 7] {
            collector.add(unit);
        }

        let expected = [Run { first: 1, count: 3 }, Run { first: 7, count: 1 }];
        assert_eq!(collector.into_runs(), expected);
    }
}
