//! Accounts between all workers: what is consistent only if all threads are of one instant.
//!
//! Each step of each worker moves money between two accounts, under one lock.  No money is lost,
//! each account is right by itself, and each worker's steps are here in their order, none twice.

use crate::page::{Page, WORDS, mix};

/// Accounts, each on a page of its own.
const ACCOUNTS: u64 = 64;
/// Money on each at the start.
const START: u64 = 1 << 20;

/// An account's page holds its balance, how often it has changed, and a checksum of both.
#[derive(Debug)]
pub struct Bank {
    accounts: Vec<Page>,
    last: Vec<u64>,
    transfers: u64,
}

impl Bank {
    /// Opens a bank for workers that are at the numbers `last`.
    pub fn new(last: Vec<u64>) -> Self {
        let mut bank = Self { accounts: Vec::new(), last, transfers: 0 };
        for index in 0..ACCOUNTS {
            bank.accounts.push([0; WORDS]);
            bank.set(index, START, 0);
        }
        bank
    }

    /// Worker `who` has done step `seq`.
    pub fn transfer(&mut self, who: usize, seq: u64) -> Result<(), String> {
        let dice = mix(who as u64, seq);
        let from = dice % ACCOUNTS;
        let to = (from + 1 + (dice >> 32) % (ACCOUNTS - 1)) % ACCOUNTS;
        let (has, changes) = self.get(from)?;
        let amount = (dice >> 8) % 1000;
        let amount = amount.min(has);
        self.set(from, has - amount, changes + 1);
        let (has, changes) = self.get(to)?;
        self.set(to, has + amount, changes + 1);
        self.transfers += 1;
        let before = std::mem::replace(&mut self.last[who], seq);
        if before + 1 == seq {
            return Ok(());
        }
        Err(format!("bank: worker {who} came with step {seq} after {before}"))
    }

    /// Checks that no money and no transfer is lost.
    pub fn check(&self) -> Result<u64, String> {
        let (mut money, mut changes) = (0, 0);
        for index in 0..ACCOUNTS {
            let (has, times) = self.get(index)?;
            money += has;
            changes += times;
        }
        if money != ACCOUNTS * START || changes != 2 * self.transfers {
            let transfers = self.transfers;
            return Err(format!("bank: {money} in all, {changes} changes, {transfers} transfers"));
        }
        Ok(ACCOUNTS)
    }

    /// Checks that the bank knows of each worker's steps what that worker knows.
    pub fn check_last(&self, seqs: &[u64]) -> Result<(), String> {
        if self.last == seqs {
            return Ok(());
        }
        Err(format!("bank: workers are at {seqs:?}, here at {:?}", self.last))
    }

    /// How many transfers there were.
    pub fn transfers(&self) -> u64 {
        self.transfers
    }

    fn get(&self, index: u64) -> Result<(u64, u64), String> {
        let page = usize::try_from(index).ok().and_then(|index| self.accounts.get(index));
        match page {
            Some([has, changes, sum, ..]) if *sum == mix(*has, *changes) => Ok((*has, *changes)),
            _ => Err(format!("bank: account {index} is torn")),
        }
    }

    fn set(&mut self, index: u64, has: u64, changes: u64) {
        let page = usize::try_from(index).ok().and_then(|index| self.accounts.get_mut(index));
        if let Some([to_has, to_changes, sum, ..]) = page {
            (*to_has, *to_changes, *sum) = (has, changes, mix(has, changes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn busy() -> Bank {
        let mut bank = Bank::new(vec![0, 10]);
        for step in 1..500 {
            bank.transfer(0, step).unwrap();
            bank.transfer(1, 10 + step).unwrap();
        }
        bank
    }

    #[test]
    fn no_money_and_no_step_is_lost() {
        let bank = busy();
        assert_eq!(bank.check(), Ok(ACCOUNTS));
        bank.check_last(&[499, 509]).unwrap();
        assert!(bank.check_last(&[499, 508]).is_err());
    }

    #[test]
    fn a_step_done_twice_or_left_out_is_found() {
        assert!(busy().transfer(0, 499).is_err());
        assert!(busy().transfer(0, 501).is_err());
    }

    #[test]
    fn an_account_of_another_instant_is_found() {
        let mut bank = busy();
        let old = Bank::new(vec![]).accounts[5];
        bank.accounts[5] = old;
        assert!(bank.check().is_err());
        bank.accounts[5][0] += 1;
        assert!(bank.check().unwrap_err().contains("account 5 is torn"));
    }
}
