//! Options in, figures out.

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::guest::Failure;

/// Reads the number behind `option`.
pub fn number(
    option: &str,
    word: Option<String>,
    allowed: RangeInclusive<u32>,
) -> Result<u32, Failure> {
    let value = word.ok_or_else(|| format!("{option} needs a number"))?.parse()?;
    if allowed.contains(&value) {
        return Ok(value);
    }
    Err(format!("{option} is {value}, not {} to {}", allowed.start(), allowed.end()).into())
}

/// A duration as figures have it.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

/// Returns the smallest of `values` that at least `percent` of them do not exceed.
pub fn quantile(values: &[f64], percent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[(sorted.len() * percent).div_ceil(100).saturating_sub(1)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_one_of_the_values() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert_eq!((quantile(&values, 50), quantile(&values, 99)), (2.0, 4.0));
    }
}
